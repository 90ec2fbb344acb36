"""Layout of a prepared weight: rows of codes in split halves, the numbers as stored, and the metadata to read them.

A row of K codes is padded with zeros to a multiple of 128. Each group of 2H codes fills H bytes: byte p holds code p in
its low and code p + H in its high nibble, so that what a thread loads (16 bytes) meets x in two contiguous pieces. H is
the largest of 64, 32 and 16 that divides the block, so that the low and the high half of a group lie in one block each.

| tensor | shape | dtype |
|---|---|---|
| codes | [N, Kp / 2] | uint8 |
| scale | [N, ceil(K / block)] | as stored; e4m3 and e8m0 as uint8 |
| second (offset or zero) | [N, ceil(K / block)] | as stored |
| global scale | [1] or [N] | float32 |
| further side tensors of the weight | | as stored |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core import ConfigError, NibbleOrder, PackedWeight, Packing, ScaleKind, WeightSpec, pack_codes, unpack_codes

if TYPE_CHECKING:
    from q4core import PrepareContext, Prepared

__all__ = [
    "STEP",
    "WeightMeta",
    "block_problem",
    "export_weight",
    "half_of",
    "has_regular_blocks",
    "padded_row_bytes",
    "prepare_weight",
]

STEP = 128
"""In-features that a kernel takes at a time; rows are padded to a multiple of it."""
_LAYOUT = 1
"""Changes with what tensors of equal facts mean."""
_DTYPES = ("scale_dtype", "second_dtype", "global_dtype")
_HALVES = (64, 32, 16)
_BYTE_KINDS = frozenset({ScaleKind.E8M0, ScaleKind.E4M3, ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV})
_OWN = frozenset({"qdata", "scale", "offset", "zero", "global_scale"})


@attrs.frozen(kw_only=True, cache_hash=True)
class WeightMeta:
    """The layout of one prepared weight.

    Args:
        spec: The weight's own facts.
        scale_dtype: dtype of its scales as stored.
        second_dtype: dtype of its offset or zero point as stored; None where it has neither.
        global_dtype: dtype of its global scale as stored; None where it has none.
        half: H, the codes in one half of a group: 16, 32 or 64.
        row_bytes: Bytes of a row of codes, a multiple of 64.
    """

    spec: WeightSpec
    scale_dtype: torch.dtype
    second_dtype: torch.dtype | None
    global_dtype: torch.dtype | None
    half: int
    row_bytes: int

    @classmethod
    def of(cls, weight: PackedWeight) -> WeightMeta:
        """Return the layout of a weight whose block size passes ``block_problem``."""
        second = weight.offset if weight.offset is not None else weight.zero
        return cls(
            spec=WeightSpec.of(weight),
            scale_dtype=weight.scale.dtype,
            second_dtype=None if second is None else second.dtype,
            global_dtype=None if weight.global_scale is None else weight.global_scale.dtype,
            half=half_of(weight.block_size, weight.in_features),
            row_bytes=padded_row_bytes(weight.in_features),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as what JSON holds."""
        dtypes = {name: _name_of(getattr(self, name)) for name in _DTYPES}
        return {"layout": _LAYOUT, "spec": self.spec.to_json(), "half": self.half, "row_bytes": self.row_bytes} | dtypes

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> WeightMeta:
        """Return the layout that ``to_dict`` gave.

        Raises:
            ConfigError: The facts are of another version, or no such layout.
            WeightError: They hold no spec of a weight.
        """
        try:
            spec = WeightSpec.from_json(facts["spec"])
            dtypes: dict[str, Any] = {
                name: None if facts[name] is None else getattr(torch, facts[name]) for name in _DTYPES
            }
            half, row_bytes = half_of(spec.block_size, spec.in_features), padded_row_bytes(spec.in_features)
            found = cls(spec=spec, half=half, row_bytes=row_bytes, **dtypes)
            is_equal = found.to_dict() == facts
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError("prepared layout", name="facts", rule="those of a layout", value=facts) from error
        if not is_equal:
            raise ConfigError("prepared layout", name="facts", rule=f"of layout {_LAYOUT}", value=facts)
        return found

    @property
    def second_field(self) -> str | None:
        """``"offset"``, ``"zero"`` or None: the second number of a block."""
        return next((field for field in ("offset", "zero") if field in self.spec.fields), None)

    @property
    def blocks(self) -> int:
        """Scales per row."""
        return -(-self.spec.in_features // self.spec.block_size)


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def padded_row_bytes(in_features: int) -> int:
    """Return the bytes of a row of codes, filled up to whole steps."""
    return -(-in_features // STEP) * STEP // 2


def has_regular_blocks(block_size: int) -> bool:
    """Return whether the kernels take blocks of this size whatever K is.

    Such a block is treated alike where it holds the whole row, so that one block size means one program.
    """
    return block_size % _HALVES[-1] == 0


def half_of(block_size: int, in_features: int) -> int:
    """Return H for a block size; 0 where the kernels can't take the block size."""
    if has_regular_blocks(block_size):
        return next(half for half in _HALVES if block_size % half == 0)
    return _HALVES[0] if block_size >= in_features else 0


def block_problem(block_size: int, in_features: int) -> str | None:
    """Return why the kernels can't take a block size, or None."""
    if half_of(block_size, in_features):
        return None
    return f"blocks must be of a multiple of 16 in-features, or hold the whole row, got {block_size}"


def prepare_weight(weight: PackedWeight, context: PrepareContext) -> tuple[tuple[torch.Tensor, ...], WeightMeta]:
    """Return a weight in the kernels' layout.

    Args:
        weight: With row blocks and scales of a kind other than DOUBLE_QUANT, on the context's device.
        context: Where tensors are allocated, each written once.
    """
    meta = WeightMeta.of(weight)
    rows = weight.out_features

    def keep(source: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        place = context.empty(shape, dtype)
        return place.copy_(source)

    codes = _codes(weight)
    padded = torch.nn.functional.pad(codes, (0, 2 * meta.row_bytes - codes.shape[1]))
    tensors = [keep(pack_codes(padded, Packing.half_split(2 * meta.half)), (rows, meta.row_bytes), torch.uint8)]
    scale = weight.scale.view(torch.uint8) if weight.scale_kind in _BYTE_KINDS else weight.scale
    tensors.append(keep(scale, tuple(scale.shape), scale.dtype))
    if meta.second_field is not None:
        second = getattr(weight, meta.second_field)
        tensors.append(keep(second, tuple(second.shape), second.dtype))
    if weight.global_scale is not None:
        tensors.append(keep(weight.global_scale.reshape(-1), (weight.global_scale.numel(),), torch.float32))
    tensors += [
        keep(tensor, tuple(tensor.shape), tensor.dtype) for name, tensor in weight.tensors() if name not in _OWN
    ]
    return tuple(tensors), meta


def _codes(weight: PackedWeight) -> torch.Tensor:
    """Return one code per byte, [N, K]."""
    codes = unpack_codes(weight.qdata, weight.packing)
    return codes.reshape(weight.out_features, -1)[:, : weight.in_features]


def export_weight(prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
    """Return the weight that was prepared, whole or the given rows: codes and numbers bit for bit, padding as zeros."""
    meta: WeightMeta = prepared.meta
    spec = meta.spec
    given = iter(prepared.tensors)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if rows is None else tensor[rows.to(tensor.device)]

    codes = unpack_codes(take(next(given)), Packing.half_split(2 * meta.half))[:, : spec.in_features]
    scale = take(next(given))
    fields: dict[str, Any] = {
        "qdata": _packed(codes, spec.packing),
        "scale": scale.view(meta.scale_dtype) if spec.scale_kind in _BYTE_KINDS else scale,
    }
    if meta.second_field is not None:
        fields[meta.second_field] = take(next(given))
    if meta.global_dtype is not None:
        values = next(given)
        fields["global_scale"] = (take(values) if values.numel() > 1 else values.clone()).to(meta.global_dtype)
    for name in spec.fields:
        if name not in _OWN:
            fields[name] = next(given).clone()
    return attrs.evolve(spec, out_features=codes.shape[0], fields=tuple(fields)).build(tuple(fields.values()))


def _packed(codes: torch.Tensor, packing: Packing) -> torch.Tensor:
    if packing.order is NibbleOrder.HALF_SPLIT:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % packing.group))
    return pack_codes(codes, packing)
