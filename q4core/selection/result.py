"""``Selection``: the winner of a request, which path serves which M, and a reason for every loser."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs

from q4core.diagnostics.events import emit, warn_once
from q4core.errors import Q4FallbackWarning

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4core.backend import KernelPath, Reason, Request, Segment
    from q4core.policy.config import ComputePath


@attrs.frozen
class Rejection:
    """Why one backend does not serve.

    Args:
        backend: Its name (a plugin's name where it brought none).
        reasons: Every reason, each with a stable code.
        native_state: What it said of its native part.
    """

    backend: str
    reasons: tuple[Reason, ...]
    native_state: str = "not asked"

    def __str__(self) -> str:
        """Return ``backend: reasons``."""
        return f"{self.backend}: {'; '.join(str(reason) for reason in self.reasons)}"

    def to_dict(self) -> dict[str, Any]:
        """Return backend, native load state and reasons, ready for JSON."""
        reasons = _plain_reasons(self.reasons)
        return {"backend": self.backend, "native_load_state": self.native_state, "reasons": reasons}


@attrs.frozen(kw_only=True)
class Selection:
    """The answer to a request.

    Args:
        request: What was asked.
        backend_request: The same as the backend sees it (scale kind resolved by the core where needed).
        backend: Name of the winner.
        segments: Which path serves which range of M; together they cover the request's range.
        native_state: What the winner said of its native part.
        compute_path: The policy under which it won.
        override: The backend that was asked for by name, or None.
        fallback_reason: Why the reference serves although a kernel was wanted, or None.
        rejections: Every other backend, with all its reasons.
        disqualified: Why paths of the winner that it offers may not run; empty when all may.
        gradients: Which of the winner's input gradients serves which range of M; empty where the core computes them.
        gradients_refused: Why input gradients of the winner may not run, or all are left to the core.
        proven: Whether every path of the selection has passed its self-probe on this machine, by this build.
    """

    request: Request
    backend_request: Request
    backend: str
    segments: tuple[Segment, ...]
    native_state: str
    compute_path: ComputePath
    override: str | None
    fallback_reason: str | None
    rejections: tuple[Rejection, ...]
    disqualified: tuple[Reason, ...] = ()
    gradients: tuple[Segment, ...] = ()
    gradients_refused: tuple[Reason, ...] = ()
    proven: bool

    @property
    def gradient_request(self) -> Request:
        """The request for input gradients, as the backend sees it."""
        return attrs.evolve(self.backend_request, op="input_gradient")

    @property
    def path(self) -> KernelPath:
        """The path at the lowest M asked for."""
        return self.segments[0].path

    @property
    def paths(self) -> tuple[KernelPath, ...]:
        """Each path that may run, once, by rising M."""
        return tuple(dict.fromkeys(segment.path for segment in self.segments))

    def to_dict(self) -> dict[str, Any]:
        """Return what was asked and the answer as plain lists, texts and numbers, ready for JSON."""
        return {
            "format": self.request.format.name,
            "shape": [self.request.out_features, self.request.in_features],
            "device": str(self.request.device),
            "dtype": str(self.request.dtype).removeprefix("torch."),
            "backend": self.backend,
            "native_load_state": self.native_state,
            "compute_path": self.compute_path.value,
            "path_name": self.path.name,
            "paths": [_plain_segment(segment) for segment in self.segments],
            "gradients": [_plain_segment(segment) for segment in self.gradients],
            "gradients_refused": _plain_reasons(self.gradients_refused),
            "proven": self.proven,
            "fallback_reason": self.fallback_reason,
            "rejections": [item.to_dict() for item in self.rejections],
            "disqualified": _plain_reasons(self.disqualified),
        }

    def path_for(self, rows: int) -> KernelPath:
        """Return the path that serves ``rows`` rows of x.

        Raises:
            LookupError: ``rows`` is outside the request's range.
        """
        for segment in self.segments:
            if segment.low <= rows and (segment.high is None or rows <= segment.high):
                return segment.path
        raise LookupError(rows)


def _plain_reasons(reasons: Iterable[Reason]) -> list[dict[str, str]]:
    """Return reasons as code, domain and message, ready for JSON."""
    return [{"code": item.code.value, "domain": item.code.domain, "message": item.message} for item in reasons]


def _plain_segment(segment: Segment) -> dict[str, Any]:
    """Return a path and the rows that it serves, ready for JSON."""
    path = segment.path
    return {
        "m": [segment.low, segment.high],
        "name": path.name,
        "kind": path.kind.value,
        "precision": path.precision.value,
        "tier": int(path.tier),
        "interpreted": path.interpreted,
    }


def emit_selection(selection: Selection, name: str | None, format_: str) -> None:
    """Send which backend and paths run a weight as events."""
    reason = selection.fallback_reason
    emit(
        "q4.select",
        level=logging.INFO,
        layer=name,
        format=format_,
        backend=selection.backend,
        paths=[path.name for path in selection.paths],
        compute_path=selection.compute_path.value,
        native_load_state=selection.native_state,
        proven=selection.proven,
        fallback_reason=reason,
        rejections=[str(item) for item in selection.rejections],
    )
    if reason is not None:
        emit("q4.fallback", level=logging.WARNING, layer=name, backend=selection.backend, reason=reason)


def report_selection(selection: Selection, name: str | None, format_: str) -> None:
    """Send which backend and paths run a weight as events, and warn once of a fallback."""
    emit_selection(selection, name, format_)
    if (reason := selection.fallback_reason) is not None:
        warn_once((format_, reason), Q4FallbackWarning, f"{format_}: {reason}")
