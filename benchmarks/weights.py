"""The formats that are measured, and a dense weight in one of them."""

from __future__ import annotations

from typing import Any

import attrs
import torch

import q4core as q4

__all__ = ["FORMATS", "TYPES", "exact_value", "type_of", "weight_of"]

FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {},
    "fp4": {},
    "nvfp4": {},
    "mxfp4": {},
    "q4_0": {},
    "q4_1": {},
    "int4 g32": {"block_size": 32},
    "int4 g128": {"block_size": 128},
    "q8_0": {},
}
"""What is measured, with the choices that the format leaves open."""


def weight_of(name: str, dense: torch.Tensor) -> q4.PackedWeight:
    """Return a dense weight in one of ``FORMATS``; INT4 with half-precision scales, as its checkpoints have."""
    format_ = name.split(maxsplit=1)[0]
    return q4.quantize(dense.half() if format_ == "int4" else dense, format_, **FORMATS[name])


def exact_value(weight: q4.PackedWeight) -> torch.Tensor:
    """Return scale × code in float64, without the rounding of any library's own dtype."""
    return q4.dequantize(weight, torch.float64)


_SUPER_BLOCK = 256


@attrs.frozen
class _Type:
    """How a checkpoint's type stores a weight.

    Args:
        format: Of its codes.
        levels: How many of the codes are used.
        block: In-features per scale.
        most: The largest scale within a super-block; 0 without super-blocks.
        has_second: Whether blocks have an offset, or INTEGER codes a zero point.
        signed: Whether scales within a super-block have a sign.
        order: Whether in-features are stored in another order, as after GPTQ's act-order.
    """

    format: str
    levels: int
    block: int
    most: int = 0
    has_second: bool = False
    signed: bool = False
    order: bool = False


TYPES: dict[str, dict[str, _Type]] = {
    "K-quants": {
        "Q4_K": _Type("q4_1", 16, 32, most=63, has_second=True),
        "Q5_K": _Type("q8_affine", 32, 32, most=63, has_second=True),
        "Q6_K": _Type("q8_0", 64, 16, most=127, signed=True),
        "Q3_K": _Type("q4_0", 8, 16, most=31, signed=True),
        "Q2_K": _Type("q4_1", 4, 16, most=15, has_second=True),
    },
    "other types of GGUF": {
        "Q5_0": _Type("q8_0", 32, 32),
        "Q5_1": _Type("q8_affine", 32, 32, has_second=True),
        "Q8_0": _Type("q8_0", 256, 32),
        "IQ4_NL": _Type("iq4_nl", 16, 32),
        "IQ4_XS": _Type("iq4_nl", 16, 32, most=31, signed=True),
        "MXFP4": _Type("mxfp4", 16, 32),
    },
    "INT4 and INT8": {
        "int4 g32": _Type("int4", 16, 32),
        "int4 g64": _Type("int4", 16, 64),
        "int4 g128": _Type("int4", 16, 128),
        "int4 g32 zero": _Type("int4", 16, 32, has_second=True),
        "int4 g64 zero": _Type("int4", 16, 64, has_second=True),
        "int4 g128 zero": _Type("int4", 16, 128, has_second=True),
        "int4 g128 act-order": _Type("int4", 16, 128, has_second=True, order=True),
        "int8 g32": _Type("int8", 256, 32),
        "int8 g128": _Type("int8", 256, 128),
    },
}
"""What checkpoints hold beyond ``FORMATS``, in groups that are measured together."""


def type_of(name: str, dense: torch.Tensor) -> q4.PackedWeight:
    """Return a dense weight in one of ``TYPES``, rounded plainly: its speed is what counts."""
    kind = next(group[name] for group in TYPES.values() if name in group)
    form = q4.BUILTIN_FORMATS[kind.format]
    if form.rule == "e2m1":
        return q4.quantize(dense, form)
    fields: dict[str, Any] = {}
    if kind.order:
        order = torch.randperm(dense.shape[1], generator=torch.Generator().manual_seed(2))
        fields["input_permutation"], dense = order, dense[:, order]
    grouped = dense.unflatten(1, (-1, kind.block))
    largest = grouped.abs().amax(-1)
    low = grouped.amin(-1).clamp(max=0)
    middle = float(kind.levels // 2)
    peak = max(form.codebook) if form.name == "iq4_nl" else middle - 1
    scale = (grouped.amax(-1).clamp(min=0) - low) / (kind.levels - 1) if kind.has_second else largest / peak
    values = grouped / scale[..., None]
    if form.name == "iq4_nl":
        codes = (values[..., None] - form.codebook_tensor()).abs().argmin(-1)
    elif kind.has_second:
        start = -low / scale
        codes = (
            (values + (start.round() if form.name == "int4" else start)[..., None]).round().clamp(0, kind.levels - 1)
        )
    else:  # q8_0 has two's complement
        codes = values.round() + (0 if form.name == "q8_0" else form.middle)
    stored = codes.to(torch.int16).to(torch.uint8).flatten(1)
    if kind.has_second:
        fields |= {"zero": start.round().to(torch.uint8)} if form.name == "int4" else {"offset": low.half()}
    if kind.most:
        fields |= _super_block(kind, scale, low)
    fields = {"scale": scale.half(), "packing": form.packing} | fields
    return q4.PackedWeight(
        format=form,
        qdata=q4.pack_codes(stored, form.packing),
        out_features=dense.shape[0],
        in_features=dense.shape[1],
        block_size=kind.block,
        **fields,
    )


def _super_block(kind: _Type, scale: torch.Tensor, low: torch.Tensor) -> dict[str, Any]:
    """Return scales and offsets of two levels."""
    blocks = _SUPER_BLOCK // kind.block

    def levels(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = numbers.unflatten(1, (-1, blocks))
        upper = (grouped.abs().amax(-1) / kind.most).half()
        codes = (grouped.abs() / upper[..., None].float()).round().clamp(0, kind.most)
        return codes.flatten(1).to(torch.int8 if kind.signed else torch.uint8), upper.flatten()

    own, upper = levels(scale)
    found = {"scale": own, "nested_scale": upper, "nested_block_size": blocks, "scale_kind": q4.ScaleKind.SUPER_BLOCK}
    if kind.has_second:
        offset, second = levels(low)
        found |= {"offset": offset, "nested_offset": -second}
    return found
