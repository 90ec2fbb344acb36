"""A backend's manifest, and the default deny that comes from it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from q4core.backend.support import Reason, ReasonCode
from q4core.errors import ConfigError
from q4core.formats import FLOATS, ScaleKind
from q4core.policy.config import Rounding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from q4core.backend.request import Features, Request
    from q4core.backend.support import Precision

EVERY_FORMAT = "*"
"""Stands for every format, plugins' included; for a backend that decodes through the core's own codec."""


def _frozen(items: Iterable[Any]) -> frozenset[Any]:
    return frozenset(items)


def _own_kinds(items: Mapping[Precision, Iterable[ScaleKind]]) -> Mapping[Precision, frozenset[ScaleKind]]:
    return MappingProxyType({precision: frozenset(kinds) for precision, kinds in items.items()})


@attrs.frozen(kw_only=True)
class Capabilities:
    """A backend's manifest: static, declared, certified by the kit. What is not declared is refused by the core.

    Args:
        formats: Names of the formats that it serves, or ``EVERY_FORMAT``.
        scale_kinds: Scale kinds that it reads; the core resolves others to PLAIN float32 first, if that is declared.
        precision_scale_kinds: Precision → the scale kinds that its paths read, for precisions that read others than
            ``scale_kinds``. What a request allows decides which of them count.
        devices: Device types (``"cpu"``, ``"cuda"``).
        dtypes: dtypes of x, and of y: some of float32, bfloat16 and float16, whose results the core can judge. A pair
            of them that is not served is refused by ``check``.
        precisions: Precisions of its paths.
        features: Features that it serves.
        ops: ``"linear"``, ``"quantize"``, ``"input_gradient"``, ``"program"``, ``"tokens"``, ``"spiking"``,
            ``"sparse"``, or ``"spikes"``.
        roundings: How its quantiser rounds.
    """

    formats: frozenset[str] = attrs.field(converter=_frozen)
    scale_kinds: frozenset[ScaleKind] = attrs.field(converter=_frozen)
    devices: frozenset[str] = attrs.field(converter=_frozen)
    dtypes: frozenset[torch.dtype] = attrs.field(converter=_frozen)
    precisions: frozenset[Precision] = attrs.field(converter=_frozen)
    features: Features = attrs.field(default=frozenset(), converter=_frozen)
    ops: frozenset[str] = attrs.field(default=frozenset({"linear"}), converter=_frozen)
    roundings: frozenset[Rounding] = attrs.field(default=frozenset({Rounding.NEAREST}), converter=_frozen)
    # A mapping has no hash; equal manifests have equal hashes without it.
    precision_scale_kinds: Mapping[Precision, frozenset[ScaleKind]] = attrs.field(
        factory=dict, converter=_own_kinds, hash=False
    )

    def __attrs_post_init__(self) -> None:
        """Check that results can be judged, and that kinds are given for declared precisions alone."""
        beyond = sorted(str(item) for item in self.dtypes.difference(FLOATS))
        if beyond:
            rule, hint = f"of {', '.join(map(str, FLOATS))}", "Declare no other: the self-probe could not judge it."
            raise ConfigError("capabilities", name="dtypes", rule=rule, value=beyond, hint=hint)
        unknown = sorted(str(item) for item in self.precision_scale_kinds.keys() - self.precisions)
        if unknown:
            rule = "of declared precisions"
            raise ConfigError("capabilities", name="precision_scale_kinds", rule=rule, value=unknown)

    def scale_kinds_of(self, precision: Precision) -> frozenset[ScaleKind]:
        """Return the scale kinds that paths of a precision read."""
        return self.precision_scale_kinds.get(precision, self.scale_kinds)

    def readable_kinds(self, request: Request, *, any_precision: bool = False) -> frozenset[ScaleKind]:
        """Return the scale kinds that may be read for a request: those of the precisions that it allows.

        With ``any_precision`` the request's precision does not count, as it does not for the reference.
        """
        kinds = [self.scale_kinds_of(item) for item in self._precisions(request, any_precision=any_precision)]
        # A quantiser writes scales, in no precision.
        return frozenset().union(*kinds) if kinds and request.op == "linear" else self.scale_kinds

    def _precisions(self, request: Request, *, any_precision: bool) -> frozenset[Precision]:
        allowed = frozenset(item for item in self.precisions if any_precision or request.allows(item))
        return allowed or self.precisions  # where none is allowed, the paths are refused for that, each by name

    def refusals(self, request: Request, *, any_precision: bool = False) -> tuple[Reason, ...]:
        """Return every reason for which the manifest alone refuses a request; the core's default deny.

        ``any_precision`` is that of ``readable_kinds``.
        """
        kinds = self.readable_kinds(request, any_precision=any_precision)
        resolved = {ScaleKind.PLAIN} if request.op == "linear" else set()
        asked = sorted(item.value for item in self._precisions(request, any_precision=any_precision))
        where = f" for {', '.join(asked)}" if self.precision_scale_kinds else ""
        is_served = bool(self.formats & {EVERY_FORMAT, request.format.name})
        is_readable = bool(kinds & {request.scale_kind, *resolved})
        is_rounded = request.op != "quantize" or request.rounding in self.roundings
        needed = sorted(item.words for item in request.needs - self.features)
        declared = (
            (request.op in self.ops, ReasonCode.FEATURE, f"op {request.op!r}"),
            (is_served, ReasonCode.FORMAT, f"format {request.format.name!r}"),
            (is_readable, ReasonCode.FORMAT, f"scale kind {request.scale_kind.value!r}{where}"),
            (request.device.type in self.devices, ReasonCode.DEVICE, f"device {request.device.type!r}"),
            (request.dtype in self.dtypes, ReasonCode.DTYPE, f"dtype {request.dtype} of x"),
            (request.out_dtype in self.dtypes, ReasonCode.DTYPE, f"dtype {request.out_dtype} of y"),
            (is_rounded, ReasonCode.FEATURE, f"rounding {request.rounding.value!r}"),
            *((False, ReasonCode.FEATURE, f"feature {name!r}") for name in needed),
        )
        return tuple(Reason(code, f"{what} is not declared") for is_there, code, what in declared if not is_there)
