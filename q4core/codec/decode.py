"""Dequantisation: the values that a packed weight stands for, bit-equal to each dialect's own library.

Two libraries differ in the sign of a zero: ModelOpt decodes E2M1's code 8 as +0, and some of bitsandbytes' CPU kernels
decode FP4's as -0.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from q4core.errors import InputError
from q4core.formats import BUILTIN_FORMATS, FLOATS, BlockOrder, Form, Format, unpack_codes
from q4core.machine.torch_state import dispatch_modes, is_transformed
from q4core.weight import PackedWeight
from q4core.weight.invariants import check_permutation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHUNK_ELEMENTS = 1 << 19
"""Elements decoded at once; their temporaries, at most 30 bytes each, stay below 16 MB."""
_MOST_ELEMENTS = 1 << 40
_DTYPES = (*FLOATS, torch.float64)
_WHOLE = 1 << 23
"""Up to here float32 adds whole numbers exactly."""
_TABLES: dict[tuple[Format, torch.device], torch.Tensor] = {}
"""Codebooks on devices other than the CPU: copying one there makes the host wait, which no call may do."""


def dequantize(
    weight: PackedWeight,
    dtype: torch.dtype | None = None,
    *,
    rows: slice | torch.Tensor | None = None,
    is_checked: bool = False,
) -> torch.Tensor:
    """Return the effective dense weight, so that ``y = x @ result.T``.

    Each operation is rounded to float32 once, in the order of the dialect's own library: ``code * scale``, then
    ``+ offset``; or ``(code - zero) * scale`` (no zero point means the middle code); then ``input_permutation`` and
    ``input_channel_scale``; then one cast to ``dtype``. For float64 the same formula is computed in float64 from the
    resolved float32 scales and the float32 codebook: the exact value, against which kernels are judged.

    Args:
        weight: The weight, on any device; it is only read.
        dtype: float32, bfloat16, float16 or float64; None for ``weight.dtype``.
        rows: The rows to decode, as a slice or as an int64 vector of row numbers in 0 … N - 1 (repeats allowed); None
            for all of them.
        is_checked: Whether ``weight.check_values`` has passed, as it has for every weight that a backend is given to
            prepare. Then nothing is looked at again, and with ``rows`` a slice or None the host waits for no device.

    Returns:
        [R, K] of ``dtype``, contiguous, on the weight's device. Temporaries take at most 16 MB, or what one row needs.

    Raises:
        InputError: ``weight`` is no ``PackedWeight``, ``dtype`` or ``rows`` is not legal, or the result would be
            absurdly large.
        WeightError: ``input_permutation`` is not a permutation.

    Reference:
        ``formats/table.py`` for the two formulas.
    """
    if not isinstance(weight, PackedWeight):
        raise InputError("dequantize", name="weight", rule="a PackedWeight", value=type(weight).__name__)
    target = weight.dtype if dtype is None else dtype
    if target not in _DTYPES:
        raise InputError("dequantize", name="dtype", rule=f"one of {', '.join(map(str, _DTYPES))}", value=target)
    chosen = _chosen_rows(weight, rows)
    columns = weight.in_features
    total = len(chosen) * columns
    if total > _MOST_ELEMENTS:
        hint = "Decode some rows at a time."
        raise InputError("dequantize", name="rows * K", rule="at most 2^40", value=total, where=weight.name, hint=hint)
    result = torch.empty((len(chosen), columns), dtype=target, device=weight.device)
    work = torch.float64 if target is torch.float64 else torch.float32
    decode = _decoder(weight, work)
    if not is_checked:
        check_permutation(weight)
    # A flat block may straddle rows, so scattered rows of such a weight are decoded one by one.
    is_scattered = weight.blocks is BlockOrder.FLAT and isinstance(chosen, torch.Tensor)
    step = 1 if is_scattered else max(1, _CHUNK_ELEMENTS // columns)
    for first in range(0, len(chosen), step):
        values = _values(weight, chosen[first : first + step], decode, work)
        if weight.input_permutation is not None:
            values = torch.empty_like(values).index_copy_(1, weight.input_permutation, values)
        if weight.input_channel_scale is not None:
            values *= weight.input_channel_scale.to(work)
        if len(values) == len(chosen) and values.dtype is target:
            return values.contiguous()  # one part is the whole: a copy would cost a tenth of the decoding
        result[first : first + len(values)] = values
    return result


def _chosen_rows(weight: PackedWeight, rows: slice | torch.Tensor | None) -> range | torch.Tensor:
    """Return a range of step 1, or an int64 vector on the weight's device."""
    total = weight.out_features
    if rows is None:
        return range(total)
    if isinstance(rows, slice):
        chosen = range(*rows.indices(total))
        return chosen if chosen.step == 1 else torch.tensor(chosen, dtype=torch.int64, device=weight.device)
    if not isinstance(rows, torch.Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise InputError("dequantize", name="rows", rule="a slice or an int64 vector", value=got)
    outside = (rows < 0) | (rows >= total)
    if bool(outside.any()):
        raise InputError("dequantize", name="rows", rule=f"in 0 … {total - 1}", value=int(rows[outside][0]))
    return rows.to(weight.device)


def _decoder(weight: PackedWeight, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from codes to their values, in ``dtype``, in new memory, before zero point and scale."""
    if weight.format.form is Form.INTEGER:
        middle = 0 if weight.zero is not None else weight.format.middle
        return lambda codes: codes.to(dtype).sub_(middle) if middle else codes.to(dtype)
    if weight.codebook is not None:
        table = weight.codebook.to(torch.float32).to(dtype)
    elif weight.format.codebook == BUILTIN_FORMATS["q8_0"].codebook:  # signed bytes
        return lambda codes: codes.view(torch.int8).to(dtype)
    else:
        first = _first_of_whole(weight.format.codebook)
        if first is not None:
            return lambda codes: codes.to(dtype).add_(first) if first else codes.to(dtype)
        table = _table(weight.format, weight.device).to(dtype)
    return lambda codes: table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@functools.lru_cache(maxsize=64)
def _first_of_whole(codebook: tuple[float, ...]) -> float | None:
    """Return the first of ascending whole numbers, which are computed exactly and 20 times as fast, or None."""
    first = codebook[0]
    is_whole = float(first).is_integer() and abs(first) < _WHOLE
    return first if is_whole and codebook == tuple(first + code for code in range(len(codebook))) else None


def _table(form: Format, device: torch.device) -> torch.Tensor:
    """Return the codebook on a device; not to be written to."""
    if device.type == "cpu" or torch.compiler.is_compiling() or dispatch_modes() or is_transformed():
        return form.codebook_tensor(device)  # what modes and transforms make may be anything but a tensor to keep
    known = _TABLES.get((form, device))
    if known is None:
        with torch.inference_mode(mode=False):
            known = _TABLES.setdefault((form, device), form.codebook_tensor(device))
    return known


def _values(
    weight: PackedWeight,
    rows: range | torch.Tensor,
    decode: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return some rows [R, K] in ``dtype``, by the formula of the form; FLAT blocks take consecutive rows alone."""
    blocks: slice | torch.Tensor
    if weight.blocks is BlockOrder.FLAT:
        codes, blocks, block_of = _flat_codes(weight, int(rows[0]), len(rows))
        block = 1  # the numbers are repeated for every element
    else:
        blocks = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        codes = unpack_codes(weight.qdata[blocks], weight.packing).reshape(len(rows), -1)[:, : weight.in_features]
        block_of, block = None, weight.block_size

    values = decode(codes)
    whole = weight.in_features // block

    def by_block(numbers: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views [R, blocks, block] of the values with their numbers [R, blocks, 1]; a short block last."""
        numbers = (numbers if block_of is None else numbers[block_of]).to(dtype)[:, :, None]
        if whole:
            yield torch.unflatten(values[:, : whole * block], 1, (whole, block)), numbers[:, :whole]
        if whole < numbers.shape[1]:
            yield values[:, None, whole * block :], numbers[:, whole:]

    if weight.zero is not None:
        for part, zero in by_block(weight.zero[blocks]):
            part.sub_(zero)
    for part, scale in by_block(weight.resolved_scale(blocks)):
        part.mul_(scale)
    offsets = weight.resolved_offset(blocks)
    if offsets is not None:
        for part, offset in by_block(offsets):
            part.add_(offset)
    return values


def _flat_codes(weight: PackedWeight, first: int, count: int) -> tuple[torch.Tensor, slice, torch.Tensor]:
    """Return codes [R, K] of ``count`` rows in FLAT blocks, the blocks that they touch, and each code's among these."""
    start, stop = first * weight.in_features, (first + count) * weight.in_features
    per_byte, block, shape = weight.packing.codes_per_byte, weight.block_size, (count, weight.in_features)
    codes = unpack_codes(weight.qdata[start // per_byte : -(-stop // per_byte)], weight.packing)
    blocks = slice(start // block, -(-stop // block))
    block_of = torch.arange(start, stop, device=weight.device) // block - blocks.start
    return codes[start % per_byte :][: stop - start].view(shape), blocks, block_of.view(shape)
