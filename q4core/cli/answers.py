"""What would run each layer of a checkpoint, and why nothing else: the answers that ``q4 explain`` shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs

from q4core.cli.survey import selection_paths
from q4core.diagnostics import plain_reasons, plain_withheld
from q4core.errors import BackendUnavailableError
from q4core.preparation import prepare_layer
from q4core.selecting import layer_request, select_for

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from q4core.backend import Request
    from q4core.policy import SessionConfig
    from q4core.registry import Registry
    from q4core.selection import Rejection
    from q4core.weight import PackedWeight

__all__ = ["Answer", "answer_layers", "grouped", "name_patterns"]


@attrs.frozen(kw_only=True)
class Answer:
    """What serves one layer; names as in ``Diagnostics``.

    Args:
        layer: Its name.
        format: Name of the format.
        shape: (N, K).
        device: Where it would run.
        dtype: dtype of x.
        backend: Who serves; None where nobody may.
        native_load_state: What the backend said of its native part.
        compute_path: The policy.
        path_name: The path at the lowest M; None where nobody may serve.
        paths: The paths by M.
        proven: Whether every path has passed its self-probe in this process.
        fallback_reason: Why the reference serves although a kernel was wanted.
        rejections: Every other backend, with all its reasons.
        withheld: Kernels that the backend can't offer here, and why.
        error: Why nobody may serve, or None.
        notes: What was assumed while the weight was read.
    """

    layer: str
    format: str
    shape: tuple[int, int]
    device: str
    dtype: str
    backend: str | None
    native_load_state: str | None
    compute_path: str
    path_name: str | None
    paths: tuple[Mapping[str, Any], ...]
    proven: bool
    fallback_reason: str | None
    rejections: tuple[Mapping[str, Any], ...]
    withheld: tuple[Mapping[str, Any], ...] = ()
    error: str | None = None
    notes: tuple[str, ...] = ()


def answer_layers(  # noqa: PLR0913  # the facts of one question
    weights: Mapping[str, PackedWeight],
    config: SessionConfig,
    registry: Registry,
    *,
    m: tuple[int, int | None],
    prove: bool,
    step: Callable[[str], None],
) -> tuple[list[Answer], BackendUnavailableError | None]:
    """Ask who would serve each layer.

    Args:
        weights: Module → weight, read one at a time and let go.
        config: A resolved configuration.
        registry: The plugins to choose among.
        m: Rows of x to serve.
        prove: Prepare one layer of each kind first, so that the self-probes run.
        step: Called with a layer's name when it is done.

    Returns:
        An answer for each layer, and the first refusal.

    Raises:
        UnknownBackendError, PolicyConflictError, ConfigError: The wishes themselves are at fault.
    """
    answers: list[Answer] = []
    first: BackendUnavailableError | None = None
    proved: set[Request] = set()
    for name in weights:
        weight = weights[name]
        request = layer_request(weight, config, m)
        try:
            if prove and request not in proved:
                proved.add(request)
                prepare_layer(weight, config, registry, m=m)
            answers.append(_answer(name, request, weight.notes, config, registry))
        except BackendUnavailableError as error:
            first = first or error
            answers.append(_refusal(name, request, weight.notes, config, error))
        del weight
        step(name)
    return answers, first


def _facts(name: str, request: Request, notes: tuple[str, ...], config: SessionConfig) -> dict[str, Any]:
    return {
        "layer": name,
        "format": request.format.name,
        "shape": (request.out_features, request.in_features),
        "device": str(request.device),
        "dtype": str(request.dtype).removeprefix("torch."),
        "compute_path": config.compute_path.value if config.compute_path else "auto",
        "notes": tuple(note for note in notes if not note.startswith("stored ")),
    }


def _answer(name: str, request: Request, notes: tuple[str, ...], config: SessionConfig, registry: Registry) -> Answer:
    selection = select_for(request, config, registry)
    return Answer(
        **_facts(name, request, notes, config),
        backend=selection.backend,
        native_load_state=selection.native_state,
        path_name=selection.path.name,
        paths=selection_paths(selection),
        proven=selection.proven,
        fallback_reason=selection.fallback_reason,
        rejections=_rejections(selection.rejections),
        withheld=tuple(plain_withheld(selection.withheld)),
    )


def _refusal(
    name: str, request: Request, notes: tuple[str, ...], config: SessionConfig, error: BackendUnavailableError
) -> Answer:
    return Answer(
        **_facts(name, request, notes, config),
        backend=None,
        native_load_state=None,
        path_name=None,
        paths=(),
        proven=False,
        fallback_reason=None,
        rejections=_rejections(error.rejections),
        error=str(error).partition("\n")[0],
    )


def _rejections(rejections: Iterable[Rejection]) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        {
            "backend": item.backend,
            "native_load_state": item.native_state,
            "reasons": plain_reasons(item.reasons),
        }
        for item in rejections
    )


def grouped(answers: Iterable[Answer]) -> list[list[Answer]]:
    """Return the answers with those together that say the same of different layers, in the order of the file."""
    groups: dict[Hashable, list[Answer]] = {}
    for answer in answers:
        text = f"{answer.shape[0]}×{answer.shape[1]}"  # a refusal names the shape
        error = None if answer.error is None else answer.error.replace(text, "N×K")
        same = repr(attrs.evolve(answer, layer="", shape=(0, 0), error=error))
        groups.setdefault(same, []).append(answer)
    return list(groups.values())


def name_patterns(names: Iterable[str]) -> dict[str, int]:
    """Return names with their numbers as ``*`` → how many there are, in order of appearance."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    return counts
