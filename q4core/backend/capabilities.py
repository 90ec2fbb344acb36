"""A backend's manifest, and the default deny that comes from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from q4core.backend.reason import Reason, ReasonCode
from q4core.formats import ScaleKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from q4core.backend.request import Features, Request
    from q4core.backend.verdict import Precision
    from q4core.weight import Feature

__all__ = ["EVERY_FORMAT", "Capabilities"]

EVERY_FORMAT = "*"
"""Stands for every format, plugins' included; for a backend that decodes through the core's own codec."""


def _texts(items: Iterable[str]) -> frozenset[str]:
    return frozenset(items)


def _scale_kinds(items: Iterable[ScaleKind]) -> frozenset[ScaleKind]:
    return frozenset(items)


def _dtypes(items: Iterable[torch.dtype]) -> frozenset[torch.dtype]:
    return frozenset(items)


def _precisions(items: Iterable[Precision]) -> frozenset[Precision]:
    return frozenset(items)


def _features(items: Iterable[Feature]) -> Features:
    return frozenset(items)


@attrs.frozen(kw_only=True)
class Capabilities:
    """A backend's manifest: static, declared, certified by the kit. What is not declared is refused by the core.

    Args:
        formats: Names of the formats that it serves, or ``EVERY_FORMAT``.
        scale_kinds: Scale kinds that it reads; the core resolves others to PLAIN float32 first, if that is declared.
        devices: Device types (``"cpu"``, ``"cuda"``).
        dtypes: dtypes of x, and of y; a pair of them that is not served is refused by ``check``.
        precisions: Precisions of its paths.
        features: Features that it serves.
        ops: ``"linear"``, ``"quantize"``.
    """

    formats: frozenset[str] = attrs.field(converter=_texts)
    scale_kinds: frozenset[ScaleKind] = attrs.field(converter=_scale_kinds)
    devices: frozenset[str] = attrs.field(converter=_texts)
    dtypes: frozenset[torch.dtype] = attrs.field(converter=_dtypes)
    precisions: frozenset[Precision] = attrs.field(converter=_precisions)
    features: Features = attrs.field(default=frozenset(), converter=_features)
    ops: frozenset[str] = attrs.field(default=frozenset({"linear"}), converter=_texts)

    def refusals(self, request: Request) -> tuple[Reason, ...]:
        """Return every reason for which the manifest alone refuses a request; the core's default deny."""
        reasons: list[Reason] = []

        def need(condition: bool, code: ReasonCode, message: str) -> None:  # noqa: FBT001  # reads as a sentence
            if not condition:
                reasons.append(Reason(code, f"{message} is not declared"))

        need(request.op in self.ops, ReasonCode.FEATURE, f"op {request.op!r}")
        served = bool(self.formats & {EVERY_FORMAT, request.format.name})
        need(served, ReasonCode.FORMAT, f"format {request.format.name!r}")
        readable = request.scale_kind in self.scale_kinds or ScaleKind.PLAIN in self.scale_kinds
        need(readable, ReasonCode.FORMAT, f"scale kind {request.scale_kind.value!r}")
        need(request.device.type in self.devices, ReasonCode.DEVICE, f"device {request.device.type!r}")
        need(request.dtype in self.dtypes, ReasonCode.DTYPE, f"dtype {request.dtype} of x")
        need(request.out_dtype in self.dtypes, ReasonCode.DTYPE, f"dtype {request.out_dtype} of y")
        for feature in sorted(request.needs - self.features, key=lambda item: item.value):
            need(condition=False, code=ReasonCode.FEATURE, message=f"feature {feature.value!r}")
        return tuple(reasons)
