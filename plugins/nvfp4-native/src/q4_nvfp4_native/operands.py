"""Operands of FP4 tensor cores: the prepared weight as rows of codes and scale bytes, padded to whole steps of K.

| tensor | shape | dtype |
|---|---|---|
| codes | [N, P / 2], P = K rounded up to a multiple of 128 | uint8, the even code in the lower nibble |
| scales | [N, P / block] | uint8: e4m3 or e8m0, zero past K |
| global scale, where the weight has one | [1] or [N] | float32 |
| static activation scale, where it is used | [1] | float32 |
| further side tensors of the weight | | as stored |
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core import (
    ConfigError,
    NibbleOrder,
    PackedWeight,
    Packing,
    PrepareError,
    Reason,
    ReasonCode,
    ScaleKind,
    WeightSpec,
    pack_codes,
    unpack_codes,
)

if TYPE_CHECKING:
    from q4core import PrepareContext, Prepared

__all__ = ["BYTE_KINDS", "STEP", "OperandMeta", "export_operand", "prepare_operand"]

STEP = 128
"""In-features that a kernel takes at a time."""
BYTE_KINDS = frozenset({ScaleKind.E8M0, ScaleKind.E4M3, ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV})
_LAYOUT = 1
"""Changes with what tensors of equal facts mean."""
_DTYPES = ("scale_dtype", "global_dtype")
_OWN = frozenset({"qdata", "scale", "global_scale"})
_LARGEST_BYTE = 0x7E
"""Above it stand e4m3's NaN and every byte with a sign."""


@attrs.frozen(kw_only=True, cache_hash=True)
class OperandMeta:
    """The layout of one prepared weight.

    Args:
        spec: The weight's own facts.
        scale_dtype: dtype of its scales as stored.
        global_dtype: dtype of its global scale as stored; None where it has none.
        has_static_scale: Whether activations are rounded under the checkpoint's scale.
    """

    spec: WeightSpec
    scale_dtype: torch.dtype
    global_dtype: torch.dtype | None
    has_static_scale: bool
    padded: int = attrs.field(
        init=False, default=attrs.Factory(lambda self: -(-self.spec.in_features // STEP) * STEP, takes_self=True)
    )
    """P: in-features, padded."""

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as what JSON holds."""
        names = {name: None if (kind := getattr(self, name)) is None else str(kind)[6:] for name in _DTYPES}
        return {"operand": _LAYOUT, "spec": self.spec.to_json(), "has_static_scale": self.has_static_scale} | names

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> OperandMeta:
        """Return the layout that ``to_dict`` gave.

        Raises:
            ConfigError: The facts are of another version, or no such layout.
            WeightError: They hold no spec of a weight.
        """
        try:
            given: dict[str, Any] = {name: facts[name] for name in _DTYPES}
            dtypes: dict[str, Any] = {
                name: None if text is None else getattr(torch, text) for name, text in given.items()
            }
            is_static = bool(facts["has_static_scale"])
            found = cls(spec=WeightSpec.from_json(facts["spec"]), has_static_scale=is_static, **dtypes)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError("prepared operand", name="facts", rule="those of a layout", value=facts) from error
        if found.to_dict() != facts:
            raise ConfigError("prepared operand", name="facts", rule=f"of layout {_LAYOUT}", value=facts)
        return found

    @property
    def global_divides(self) -> bool:
        """Whether the global scale divides."""
        return self.spec.scale_kind is ScaleKind.E4M3_DIV


def _is_static(weight: PackedWeight) -> bool:
    """Return whether activations are rounded under the checkpoint's scale; e8m0 block scales need none."""
    return weight.activation_scale is not None and weight.scale_kind is not ScaleKind.E8M0


def _refusals(weight: PackedWeight) -> list[Reason]:
    """Return for which of its numbers FP4 tensor cores can't read a weight."""
    reasons = []
    if weight.scale_kind is not ScaleKind.E8M0 and int(weight.scale.view(torch.uint8).max()) > _LARGEST_BYTE:
        rule = "e4m3 scales must be numbers without sign: FP4 tensor cores read no other"
        reasons.append(Reason(ReasonCode.FORMAT, f"{weight.label('scale')}: {rule}"))
    if weight.activation_scale is not None and _is_static(weight):
        scale = float(weight.activation_scale)
        if not (math.isfinite(scale) and scale > 0):
            rule = f"the static activation scale must be finite and positive, got {scale}"
            reasons.append(Reason(ReasonCode.FORMAT, f"{weight.label('activation_scale')}: {rule}"))
    return reasons


def prepare_operand(weight: PackedWeight, context: PrepareContext) -> tuple[tuple[torch.Tensor, ...], OperandMeta]:
    """Return a weight as the right-hand operand.

    Args:
        weight: With row blocks and byte scales, on the context's device.
        context: Where tensors are allocated, each written once.

    Raises:
        PrepareError: An e4m3 scale is NaN or has a sign, or the static activation scale is no scale.
    """
    reasons = _refusals(weight)
    if reasons:
        raise PrepareError(reasons, is_for_this_weight=True)
    meta = OperandMeta(
        spec=WeightSpec.of(weight),
        scale_dtype=weight.scale.dtype,
        global_dtype=None if weight.global_scale is None else weight.global_scale.dtype,
        has_static_scale=_is_static(weight),
    )

    def keep(source: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        place = context.empty(shape, dtype)
        return place.copy_(source)

    rows, columns = weight.shape
    codes = torch.nn.functional.pad(weight.codes(), (0, meta.padded - columns))
    scales = weight.scale.view(torch.uint8)
    scales = torch.nn.functional.pad(scales, (0, meta.padded // weight.block_size - scales.shape[1]))
    tensors = [
        keep(pack_codes(codes, Packing.LOW_FIRST), (rows, meta.padded // 2), torch.uint8),
        keep(scales, tuple(scales.shape), torch.uint8),
    ]
    if weight.global_scale is not None:
        tensors.append(keep(weight.global_scale.reshape(-1), (weight.global_scale.numel(),), torch.float32))
    if meta.has_static_scale and weight.activation_scale is not None:
        tensors.append(keep(weight.activation_scale.reshape(1), (1,), torch.float32))
    tensors += [
        keep(tensor, tuple(tensor.shape), tensor.dtype) for name, tensor in weight.tensors() if name not in _OWN
    ]
    return tuple(tensors), meta


def export_operand(prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
    """Return the weight that was prepared, whole or the given rows: codes and scales bit for bit."""
    meta: OperandMeta = prepared.meta
    spec = meta.spec
    given = iter(prepared.tensors)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if rows is None else tensor[rows.to(tensor.device)]

    codes = unpack_codes(take(next(given)), Packing.LOW_FIRST)[:, : spec.in_features]
    if spec.packing.order is NibbleOrder.HALF_SPLIT:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % spec.packing.group))
    scales = take(next(given))[:, : -(-spec.in_features // spec.block_size)].contiguous()
    fields: dict[str, Any] = {"qdata": pack_codes(codes, spec.packing), "scale": scales.view(meta.scale_dtype)}
    if meta.global_dtype is not None:
        values = next(given)
        fields["global_scale"] = (take(values) if values.numel() > 1 else values.reshape(())).to(meta.global_dtype)
    if meta.has_static_scale:
        next(given)
    for name in spec.fields:
        if name not in _OWN:
            fields[name] = next(given).clone()
    return attrs.evolve(spec, out_features=codes.shape[0], fields=tuple(fields)).build(tuple(fields.values()))
