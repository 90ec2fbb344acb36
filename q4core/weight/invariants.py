"""The invariants of ``PackedWeight``: shapes and dtypes at once, values when asked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from q4core.errors import WeightError
from q4core.formats import FLOATS, BlockOrder, Form, NibbleOrder, ScaleKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core.weight.packed import PackedWeight

_ZERO_DTYPES = frozenset({*FLOATS, torch.uint8, torch.int8, torch.int32})
_BYTES = frozenset({torch.uint8})
_E4M3 = frozenset({torch.uint8, torch.float8_e4m3fn})
_SCALE_DTYPES = {
    ScaleKind.PLAIN: frozenset(FLOATS),
    ScaleKind.E8M0: frozenset({torch.uint8, torch.float8_e8m0fnu}),
    ScaleKind.E4M3: _E4M3,
    ScaleKind.E4M3_MUL: _E4M3,
    ScaleKind.E4M3_DIV: _E4M3,
    ScaleKind.DOUBLE_QUANT: _BYTES,
    ScaleKind.SUPER_BLOCK: frozenset({torch.uint8, torch.int8}),
}
_FINITE, _NOT_NEGATIVE, _POSITIVE = "finite", "finite and not negative", "finite and positive"
_SIDE_RULES = {
    "nested_codebook": _FINITE,
    "nested_scale": _NOT_NEGATIVE,
    "nested_offset": _FINITE,
    "global_scale": _NOT_NEGATIVE,
    "offset": _FINITE,
    "zero": _FINITE,
    "codebook": _FINITE,
    "input_channel_scale": _FINITE,
    "activation_scale": _NOT_NEGATIVE,
}
_LARGEST_BYTES = {torch.float8_e4m3fn: 0x7E, torch.float8_e8m0fnu: 0xFE}
"""What no byte of an ordinary scale exceeds; above are NaN and, in e4m3, what has a sign: -0 is legal there."""
_PIECE = (1 << 15) - 1
"""From 2^15 elements on torch wakes its threads, which can take longer than the look itself. Whole float32 copies left
16 MB of fragmented heap behind for each layer of 8192 × 8192."""
_MOST_FEATURES = 2**31 - 1
_BYTE_BITS = 8

_Rule = tuple[bool, str, str, object]
"""Whether it is met, the field, what must hold of it, what is there."""


def check_structure(weight: PackedWeight) -> None:
    """Raise a ``WeightError`` for the first shape, dtype or device that contradicts the others."""
    for rules in (_sizes, _codes, _scales, _presence, _side_tensors):  # each relies on those before it
        for is_met, name, rule, value in rules(weight):
            if not is_met:
                raise WeightError(weight.label("weight"), name=name, rule=rule, value=value, where=weight.dialect)


def _sizes(weight: PackedWeight) -> Iterator[_Rule]:
    for name in ("out_features", "in_features"):
        size = getattr(weight, name)
        is_met = isinstance(size, int) and 0 < size <= _MOST_FEATURES
        yield is_met, name, "an integer between 1 and 2^31 - 1", size
    block, legal, bits = weight.block_size, weight.format.block_sizes, weight.format.bits
    rule = f"one of {sorted(legal)} for {weight.format}" if legal else "a positive integer"
    yield isinstance(block, int) and block > 0 and (not legal or block in legal), "block_size", rule, block
    yield weight.nested_block_size > 0, "nested_block_size", "positive", weight.nested_block_size
    yield weight.qdata.dtype == torch.uint8, "qdata", "of dtype uint8", weight.qdata.dtype
    is_met = weight.packing.codes_per_byte * bits == _BYTE_BITS
    yield is_met, "packing", f"of {bits}-bit codes", str(weight.packing)


def _codes(weight: PackedWeight) -> Iterator[_Rule]:
    rows, wanted, shape = weight.out_features, weight.in_features, list(weight.qdata.shape)
    stored = weight.qdata.numel() * weight.packing.codes_per_byte
    if weight.blocks is BlockOrder.FLAT:
        yield len(shape) == 1, "qdata", "of shape [ceil(N * K / 2)] for FLAT blocks", shape
        yield stored >= rows * wanted, "qdata", f"at least {rows * wanted} codes long", stored
        is_met = weight.packing.order is not NibbleOrder.HALF_SPLIT
        yield is_met, "packing", "LOW_FIRST or HIGH_FIRST for FLAT blocks", str(weight.packing)
        return
    rule = f"of shape [{rows}, bytes] or [{rows}, groups, bytes]"
    yield len(shape) in {2, 3} and shape[0] == rows, "qdata", rule, shape
    yield stored // rows >= wanted, "qdata", f"at least {wanted} codes long in each row", stored // rows
    group = weight.packing.group
    is_met = not group or shape[-1] * weight.packing.codes_per_byte % group == 0
    yield is_met, "qdata", f"in whole groups of {group} codes", shape


def _scales(weight: PackedWeight) -> Iterator[_Rule]:
    rows, columns, kind = weight.out_features, weight.in_features, weight.scale_kind
    flat = -(-rows * columns // weight.block_size)
    expected = [flat] if weight.blocks is BlockOrder.FLAT else [rows, weight.blocks_per_row]
    for name, legal, rule in (
        ("scale", _SCALE_DTYPES[kind], f"of a dtype that scale kind {kind.value} has"),
        ("offset", _BYTES if kind is ScaleKind.SUPER_BLOCK else FLOATS, f"of a dtype that scale kind {kind.value} has"),
        ("zero", _ZERO_DTYPES, "of dtype uint8, int8, int32 or a float one"),
    ):
        tensor = getattr(weight, name)
        if tensor is not None:
            yield tensor.dtype in legal, name, rule, tensor.dtype
            yield list(tensor.shape) == expected, name, f"of shape {expected}", list(tensor.shape)


def _presence(weight: PackedWeight) -> Iterator[_Rule]:
    form, kind = str(weight.format), f"scale kind {weight.scale_kind.value}"
    is_integer, is_nested = weight.format.form is Form.INTEGER, weight.scale_kind is ScaleKind.DOUBLE_QUANT
    is_super = weight.scale_kind is ScaleKind.SUPER_BLOCK
    wanted = {
        "offset": (form, weight.format.has_offset),
        "codebook" if is_integer else "zero": (form, False),
        "global_scale": (kind, weight.scale_kind in {ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV}),
        "nested_codebook": (kind, is_nested),
        "nested_scale": (kind, is_nested or is_super),
        "nested_offset": (kind, is_nested or (is_super and weight.format.has_offset)),
    }
    for name, (why, is_wanted) in wanted.items():
        is_there = getattr(weight, name) is not None
        rule = f"{'present' if is_wanted else 'absent'} for {why}"
        yield is_there == is_wanted, name, rule, "present" if is_there else "absent"
    per_row, nested = weight.blocks_per_row, weight.nested_block_size
    is_met = not is_super or (weight.blocks is BlockOrder.ROW and per_row % nested == 0)
    yield is_met, "nested_block_size", f"a divisor of the {per_row} scales of a row for {kind}", nested


def _side_tensors(weight: PackedWeight) -> Iterator[_Rule]:
    columns = weight.in_features
    second = -(-weight.scale.numel() // weight.nested_block_size)
    for name, legal in (
        ("codebook", (2**weight.format.bits,)),
        ("nested_codebook", (256,)),
        ("nested_scale", (second,)),
        ("nested_offset", (second if weight.scale_kind is ScaleKind.SUPER_BLOCK else 1,)),
        ("input_channel_scale", (columns,)),
        ("input_permutation", (columns,)),
        ("activation_scale", (1,)),
        ("global_scale", (1, weight.out_features)),
    ):
        tensor = getattr(weight, name)
        if tensor is None:
            continue
        rule = f"a vector of {' or '.join(map(str, legal))}"
        yield tensor.dim() <= 1 and tensor.numel() in legal, name, rule, list(tensor.shape)
        if name == "input_permutation":
            yield tensor.dtype == torch.int64, name, "of dtype int64", tensor.dtype
        else:
            yield tensor.dtype in FLOATS, name, "of dtype float32, float16 or bfloat16", tensor.dtype
    devices = sorted({str(tensor.device) for _, tensor in weight.tensors()})
    yield len(devices) == 1, "tensors", "all on one device", devices


def check_values(weight: PackedWeight) -> None:
    """Do what ``PackedWeight.check_values`` does, whether it was done before or not."""
    for name, tensor, rule in _numbers(weight):
        bad = first_illegal(tensor, rule)
        if bad is not None:
            position, value = bad
            what, field, source = weight.label("weight"), f"{name}{position}", weight.dialect
            hint = "Read it in its own dialect, or download it again if it is damaged."
            raise WeightError(what, name=field, rule=rule, value=value, where=source, hint=hint)
    check_permutation(weight)


def first_illegal(tensor: torch.Tensor, rule: str) -> tuple[list[int], float] | None:
    """Return position and value of the first number of a float tensor that breaks one of the rules above, or None."""
    if tensor.numel() > _PIECE:  # part by part, so that no temporary is as large as a tensor
        step = max(1, _PIECE * len(tensor) // tensor.numel())
        for start in range(0, len(tensor), step):
            part = tensor[start] if step == 1 else tensor[start : start + step]
            bad = first_illegal(part, rule)
            if bad is not None:
                position, value = bad
                return [start, *position] if step == 1 else [start + position[0], *position[1:]], value
        return None
    if not tensor.numel() or _is_surely_legal(tensor, rule):
        return None
    values = tensor.to(torch.float32)
    is_legal = torch.isfinite(values)
    if rule != _FINITE:
        is_legal &= values >= 0 if rule == _NOT_NEGATIVE else values > 0
    places = (~is_legal).nonzero().tolist()
    return (places[0], values[tuple(places[0])].item()) if places else None


def check_permutation(weight: PackedWeight) -> None:
    """Raise a ``WeightError`` unless ``input_permutation``, where there is one, names every in-feature once."""
    permutation = weight.input_permutation
    if permutation is None:
        return
    wanted = torch.arange(weight.in_features, device=permutation.device)
    if not torch.equal(permutation.sort().values, wanted):
        rule = f"a permutation of 0 … {weight.in_features - 1}"
        raise WeightError(weight.label("weight"), name="input_permutation", rule=rule, where=weight.dialect)


def _numbers(weight: PackedWeight) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield (field, tensor, rule) for what must be checked; scales of one byte as the float8 that they are."""
    if weight.scale_kind is ScaleKind.PLAIN:
        yield "scale", weight.scale, _FINITE if weight.format.has_signed_scales else _NOT_NEGATIVE
    elif weight.scale_kind is ScaleKind.E8M0:
        yield "scale", weight.scale.view(torch.float8_e8m0fnu), _NOT_NEGATIVE
    elif weight.scale_kind not in {ScaleKind.DOUBLE_QUANT, ScaleKind.SUPER_BLOCK}:
        yield "scale", weight.scale.view(torch.float8_e4m3fn), _NOT_NEGATIVE
    own = {ScaleKind.E4M3_DIV: {"global_scale": _POSITIVE}, ScaleKind.SUPER_BLOCK: {"nested_scale": _FINITE}}
    for name, rule in (_SIDE_RULES | own.get(weight.scale_kind, {})).items():
        tensor = getattr(weight, name)
        if tensor is not None and tensor.is_floating_point():
            yield name, tensor, rule


def _is_surely_legal(piece: torch.Tensor, rule: str) -> bool:
    """Return whether its extremes show that a piece is legal; they need no float32 copy of it."""
    byte = _LARGEST_BYTES.get(piece.dtype)
    if byte is not None:
        return int(piece.view(torch.uint8).max()) <= byte
    low, high = (extreme.item() for extreme in torch.aminmax(piece))  # a NaN anywhere makes both NaN
    if not high < math.inf:
        return False
    return low > 0 if rule == _POSITIVE else low >= 0 if rule == _NOT_NEGATIVE else low > -math.inf
