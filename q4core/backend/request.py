"""``Request``: the facts of the weight, of the call and of the device that a backend decides on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from q4core.backend.support import ROW_RANGE, Precision, is_row_range, require
from q4core.errors import ConfigError
from q4core.policy.config import ActivationPrecision, Rounding, to_option
from q4core.weight import Feature, PackedWeight

if TYPE_CHECKING:
    from q4core.formats import Format, Packing, ScaleKind

_OPS = ("linear", "quantize", "input_gradient")
_OPS_RULE = f"one of {', '.join(map(repr, _OPS))}"  # not for each request anew
_OF_WEIGHT = ("format", "scale_kind", "packing", "block_size", "features", "out_features", "in_features")

_ROUNDED = {
    ActivationPrecision.INT16: Precision.W4I16,
    ActivationPrecision.INT8: Precision.W4A8,
    ActivationPrecision.FP4: Precision.W4A4,
}

Features = frozenset[Feature]


def _to_device(value: torch.device | str) -> torch.device:
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise ConfigError("request", name="device", rule="a torch device", value=value) from None


def _to_precision(value: ActivationPrecision | str) -> ActivationPrecision:
    return to_option(ActivationPrecision, value, "request", "precision")


@attrs.frozen(kw_only=True, cache_hash=True)
class Request:
    """Everything that a backend may decide on: facts of the weight, the call and the machine's device.

    Args:
        op: ``"linear"``, ``"quantize"`` or ``"input_gradient"``.
        format: The weight's format.
        scale_kind: How its scales are stored.
        packing: Its nibble order.
        block_size: In-features per scale.
        scale_dtype: dtype of the stored scales.
        second_dtype: dtype of the stored offset or zero point; None where the weight has neither.
        features: What it needs beyond the plain formula.
        has_activation_scale: Whether the checkpoint brings a static activation scale, for paths that round activations
            to FP4; the others ignore it.
        out_features: N.
        in_features: K.
        device: Where x and the prepared weight live; a CUDA device with its index.
        dtype: dtype of x (float32, bfloat16, float16).
        out_dtype: dtype of y.
        precision: To what precision activations may be rounded; what that allows is the core's answer: ``allows``.
        gradients: Whether gradients to the input will be asked for.
        m: (lowest, highest) rows of x (of y's gradient) that must be served; None for no upper end.
        rounding: How a quantiser is to round; nothing else reads it.
    """

    op: str = "linear"
    format: Format
    scale_kind: ScaleKind
    packing: Packing
    block_size: int
    scale_dtype: torch.dtype = torch.float32
    second_dtype: torch.dtype | None = None
    features: Features = frozenset()
    has_activation_scale: bool = False
    out_features: int
    in_features: int
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=_to_device)
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = attrs.field(default=attrs.Factory(lambda self: self.dtype, takes_self=True))
    precision: ActivationPrecision = attrs.field(default=ActivationPrecision.AUTO, converter=_to_precision)
    gradients: bool = False
    m: tuple[int, int | None] = (1, None)
    rounding: Rounding = Rounding.NEAREST

    def __attrs_post_init__(self) -> None:
        """Check op, dtypes and M range."""
        require(is_row_range(self.m), "request", "m", ROW_RANGE, self.m)
        for name in ("dtype", "out_dtype"):
            if not isinstance(getattr(self, name), torch.dtype):
                raise ConfigError("request", name=name, rule="a torch dtype", value=getattr(self, name))
        require(self.op in _OPS, "request", "op", _OPS_RULE, self.op)

    @classmethod
    def for_weight(  # noqa: PLR0913  # one argument per fact that the weight does not know
        cls,
        weight: PackedWeight,
        *,
        m: tuple[int, int | None] = (1, None),
        dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        precision: ActivationPrecision = ActivationPrecision.AUTO,
        gradients: bool = False,
    ) -> Request:
        """Return the request that a linear layer over ``weight`` makes.

        Arguments are fields of the request; ``dtype`` and ``device`` default to the weight's own, and
        ``out_dtype`` to ``dtype``.
        """
        second = weight.zero if weight.offset is None else weight.offset
        return cls(
            **{name: getattr(weight, name) for name in _OF_WEIGHT},
            scale_dtype=weight.scale.dtype,
            second_dtype=None if second is None else second.dtype,
            has_activation_scale=weight.activation_scale is not None,
            device=device if device is not None else weight.device,
            dtype=dtype or weight.dtype,
            out_dtype=out_dtype or dtype or weight.dtype,
            precision=precision,
            gradients=gradients,
            m=m,
        )

    @property
    def needs(self) -> Features:
        """The features that must be declared: the weight's, and GRADIENTS where asked for."""
        return self.features | {Feature.GRADIENTS} if self.gradients else self.features

    def allows(self, precision: Precision) -> bool:
        """Return whether a path of some precision may serve; AUTO means exact, or int16 on CPUs, unless training."""
        if self.op == "quantize":  # which has no activations
            return True
        if self.precision is ActivationPrecision.AUTO:
            exact_only = self.gradients or self.device.type != "cpu"
            return precision.is_exact or (precision is Precision.W4I16 and not exact_only)
        if self.precision is ActivationPrecision.EXACT:
            return precision.is_exact
        return precision is _ROUNDED[self.precision]
