"""Random packed weights straight from codes and scales, and what they mean, element by element in numpy.

Nothing here goes through the codec: the oracle reads bytes and computes each value by itself.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

import q4core as q4

ROW, FLAT = q4.BlockOrder.ROW, q4.BlockOrder.FLAT
PACKINGS = {
    "low": q4.Packing.LOW_FIRST,
    "high": q4.Packing.HIGH_FIRST,
    "half16": q4.Packing.half_split(16),
    "half32": q4.Packing.half_split(32),
}
KINDS = {name: sorted(form.scale_kinds, key=str) for name, form in q4.BUILTIN_FORMATS.items()}
QUANTISED = [name for name, form in q4.BUILTIN_FORMATS.items() if form.rule]
"""Formats that a rule quantises to."""
WRITTEN_KINDS = [(name, kind) for name in QUANTISED for kind in KINDS[name] if kind is not q4.ScaleKind.SUPER_BLOCK]
"""The scale kinds that rules write: a super-block's are read alone."""
FORMAT_KINDS = [(name, kind) for name, kinds in KINDS.items() for kind in kinds]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns, which distinguish -0 from 0 and compare NaN with itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def pack(codes: np.ndarray[Any, Any], packing: q4.Packing) -> torch.Tensor:
    """Return bytes [R, P] that hold codes [R, C], by the definition of each order, code by code."""
    rows, count = codes.shape
    if packing.order is q4.NibbleOrder.BYTES:
        return torch.from_numpy(codes.astype(np.uint8))
    group = packing.group or 2
    padded = np.zeros((rows, -(-count // group) * group), np.uint8)
    padded[:, :count] = codes
    packed = np.zeros((rows, padded.shape[1] // 2), np.uint8)
    for place in range(padded.shape[1]):
        base, inside = divmod(place, group)
        half = group // 2
        byte = base * half + inside % half
        is_high = inside >= half
        if packing.order is q4.NibbleOrder.HIGH_FIRST:
            is_high = not is_high
        packed[:, byte] |= padded[:, place] << (4 if is_high else 0)
    return torch.from_numpy(packed)


def _whole(generator: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator)


def _random_scales(
    form: q4.Format, kind: q4.ScaleKind, shape: tuple[int, ...], generator: torch.Generator
) -> dict[str, Any]:
    """Return scales of a kind, their levels, and offsets where the format has them."""
    fields: dict[str, Any] = {}
    if kind is q4.ScaleKind.PLAIN:
        fields["scale"] = torch.rand(shape, generator=generator) * 0.1 + 1e-3
    elif kind is q4.ScaleKind.E8M0:
        fields["scale"] = _whole(generator, 100, 140, *shape).to(torch.uint8).view(torch.float8_e8m0fnu)
    elif kind is q4.ScaleKind.SUPER_BLOCK:
        return _super_blocks(form, shape, generator)
    elif kind is q4.ScaleKind.DOUBLE_QUANT:
        fields["scale"] = _whole(generator, 0, 256, *shape).to(torch.uint8)
        fields["nested_codebook"] = torch.linspace(-1, 1, 256)
        fields["nested_scale"] = torch.rand(-(-fields["scale"].numel() // 256), generator=generator)
        fields["nested_offset"] = torch.tensor(1.7310585975646973)
    else:
        fields["scale"] = _whole(generator, 1, 127, *shape).to(torch.uint8).view(torch.float8_e4m3fn)
    if kind in {q4.ScaleKind.E4M3_MUL, q4.ScaleKind.E4M3_DIV}:
        fields["global_scale"] = torch.tensor(0.0123456 if kind is q4.ScaleKind.E4M3_MUL else 1337.7314)
    if form.has_offset:
        fields["offset"] = torch.randn(shape, generator=generator).to(torch.float16)
    return fields


def _super_blocks(form: q4.Format, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Any]:
    rows, blocks = shape
    size = next(size for size in (8, 4, 3, 2, 1) if blocks % size == 0)
    fields: dict[str, Any] = {"nested_block_size": size}
    fields["nested_scale"] = torch.randn(rows * blocks // size, generator=generator).to(torch.float16)
    if form.has_offset:
        fields["scale"] = _whole(generator, 0, 64, *shape).to(torch.uint8)
        fields["offset"] = _whole(generator, 0, 64, *shape).to(torch.uint8)
        fields["nested_offset"] = torch.randn(rows * blocks // size, generator=generator).to(torch.float16)
    else:
        fields["scale"] = _whole(generator, -128, 128, *shape).to(torch.int8)
    return fields


def random_weight(
    name: str,
    n: int,
    k: int,
    kind: q4.ScaleKind | None = None,
    /,
    *,
    block: int | None = None,
    packing: q4.Packing | None = None,
    blocks: q4.BlockOrder = ROW,
    seed: int = 0,
    **changes: Any,
) -> q4.PackedWeight:
    """Return a weight of random codes and random scales of a kind; ``changes`` replaces any field."""
    form = q4.BUILTIN_FORMATS[name]
    kind = kind or KINDS[name][0]
    block = block or form.block_size
    packing = packing or form.packing
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {kind} {n} {k} {seed}".encode()))

    flat = blocks is FLAT
    shape = (-(-n * k // block),) if flat else (n, -(-k // block))
    codes = _whole(generator, 0, 2**form.bits, 1 if flat else n, n * k if flat else k)
    qdata = pack(codes.numpy().astype(np.uint8), packing)
    fields = _random_scales(form, kind, shape, generator)
    if form.form is q4.Form.INTEGER:
        fields["zero"] = _whole(generator, 0, 2**form.bits, *shape).to(torch.uint8)
    fields.update(qdata=qdata[0] if flat else qdata, scale_kind=kind, packing=packing, blocks=blocks, block_size=block)
    fields.update(changes)
    return q4.PackedWeight(format=form, out_features=n, in_features=k, **fields)


def _float8(byte: int) -> float:
    """Return the value of an e4m3 byte."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def scale_of(weight: q4.PackedWeight, place: int) -> Any:
    """Return one resolved block scale (np.float32), by its place among all of them."""
    stored = weight.scale.reshape(-1)[place]
    kind = weight.scale_kind
    if kind is q4.ScaleKind.PLAIN:
        return np.float32(float(stored))
    if kind is q4.ScaleKind.SUPER_BLOCK:
        assert weight.nested_scale is not None
        return np.float32(
            np.float32(int(stored)) * np.float32(float(weight.nested_scale[place // weight.nested_block_size]))
        )
    byte = int(stored.view(torch.uint8))
    if kind is q4.ScaleKind.E8M0:
        return np.float32(np.ldexp(1.0, byte - 127)) if byte < 255 else np.float32("nan")
    if kind is q4.ScaleKind.DOUBLE_QUANT:
        table, second, mean = weight.nested_codebook, weight.nested_scale, weight.nested_offset
        assert table is not None
        assert second is not None
        assert mean is not None
        product = np.float32(float(table[byte])) * np.float32(float(second[place // weight.nested_block_size]))
        return np.float32(product + np.float32(float(mean)))
    value = np.float32(_float8(byte))
    if weight.global_scale is None:
        return value
    every = weight.global_scale.reshape(-1)
    total = np.float32(float(every[place // weight.blocks_per_row if len(every) > 1 else 0]))
    return np.float32(total * value if kind is q4.ScaleKind.E4M3_MUL else value / total)


def offset_of(weight: q4.PackedWeight, place: int) -> Any:
    """Return one resolved block offset (np.float32), by its place among all of them."""
    assert weight.offset is not None
    stored = np.float32(float(weight.offset.reshape(-1)[place]))
    if weight.scale_kind is not q4.ScaleKind.SUPER_BLOCK:
        return stored
    assert weight.nested_offset is not None
    return np.float32(stored * np.float32(float(weight.nested_offset[place // weight.nested_block_size])))


@np.errstate(over="ignore", invalid="ignore")
def oracle(weight: q4.PackedWeight, work: type = np.float32) -> torch.Tensor:
    """Return the effective weight [N, K], computed in ``work`` (np.float32 or np.float64) one by one."""
    n, k, packing = weight.out_features, weight.in_features, weight.packing
    group = packing.group or 2
    flat = weight.blocks is FLAT
    bytes_ = weight.qdata.reshape(1 if flat else n, -1).numpy()
    codebook = weight.format.codebook if weight.codebook is None else weight.codebook.tolist()
    side = {
        name: None if (t := getattr(weight, name)) is None else t.reshape(-1).tolist() for name in ("offset", "zero")
    }
    permutation = range(k) if weight.input_permutation is None else weight.input_permutation.tolist()
    result: np.ndarray[Any, Any] = np.zeros((n, k), work)
    for row in range(n):
        for column in range(k):
            line, place = (0, row * k + column) if flat else (row, column)
            if packing.order is q4.NibbleOrder.BYTES:
                code = int(bytes_[line, place])
            else:
                base, inside = divmod(place, group)
                byte = int(bytes_[line, base * (group // 2) + inside % (group // 2)])
                is_high = (inside >= group // 2) != (packing.order is q4.NibbleOrder.HIGH_FIRST)
                code = byte >> 4 if is_high else byte & 15
            block = place // weight.block_size + (0 if flat else row * weight.blocks_per_row)
            scale = work(scale_of(weight, block))
            if weight.format.form is q4.Form.INTEGER:
                middle = 2 ** (weight.format.bits - 1)
                value = (work(code) - work(middle if side["zero"] is None else side["zero"][block])) * scale
            else:
                value = work(np.float32(codebook[code])) * scale
            if side["offset"] is not None:
                value = value + work(offset_of(weight, block))
            result[row, permutation[column]] = value
    if weight.input_channel_scale is not None:
        result *= weight.input_channel_scale.to(torch.float32).numpy().astype(work)
    return torch.from_numpy(result)
