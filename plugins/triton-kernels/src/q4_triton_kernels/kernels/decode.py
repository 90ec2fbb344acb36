"""Decoding that all kernels share: codes and scale bytes to numbers. All of it is exact.

Scales are decoded from bytes by hand, because sm_80 and sm_86 have no e4m3 type.

| constexpr | values |
|---|---|
| SCALE | 0 float as stored, 1 e4m3 bytes, 2 e8m0 bytes |
| SECOND | 0 none, 1 offset, 2 zero point, 3 zero point of 8 bits, taken from the code itself |
| GLOBAL | 0 none, 1 multiplied, 2 divided by |
| CODES | 0 table of two 16-bit numbers, 1 E2M1 by its bits, 2 integer − BASE, 3 table of one 16-bit number |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from q4_triton_kernels.kernels.numbers import narrow, subtract, widen

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bits_of", "integer_of", "look_up", "scale_of", "second_of", "table_text"]


def table_text(entries: Sequence[int]) -> str:
    """Return the assembly that sets each lane to one of 16 entries of 32 bits, by its number modulo 16."""
    lines = ["mov.u32 lane, %laneid;", "and.b32 lane, lane, 15;", f"mov.b32 $0, {entries[0]};"]
    for lane, entry in enumerate(entries[1:], 1):
        lines += [f"setp.eq.u32 here, lane, {lane};", f"@here mov.b32 $0, {entry};"]
    return "{ .reg .u32 lane; .reg .pred here; " + " ".join(lines) + " }"


@triton.jit
def scale_of(stored, SCALE: tl.constexpr):
    """Return float32 scales from scales as stored."""
    if SCALE == 0:
        value = widen(stored)
    elif SCALE == 1:
        bits = stored.to(tl.int32)
        # At the top of a float32's fraction e4m3 is its value × 2^-120, its subnormal numbers included.
        size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        size = tl.where((bits & 0x7F) == 0x7F, float("nan"), size)
        value = tl.where(bits >= 0x80, -size, size)
    else:
        bits = stored.to(tl.int32)
        field = tl.where(bits == 0, 0x400000, bits << 23)  # byte 0 is 2^-127, a subnormal number
        value = tl.where(bits == 255, 0x7FC00000, field).to(tl.float32, bitcast=True)
    return value


@triton.jit
def second_of(stored, scale, SECOND: tl.constexpr):
    """Return what is added to scale × code: the offset, or minus zero point × scale; float32."""
    number = widen(stored)
    if SECOND == 2:
        number = -number * scale
    return number


@triton.jit
def look_up(code, table_ptr, TABLE: tl.constexpr):
    """Return the table's entry for the low four bits of each code (an integer below 256), int32.

    TABLE is assembly, made by ``table_text``, that puts entry l % 16 into lane l; then one shuffle per code costs no
    address, no bank conflict and no memory. Where TABLE is empty (in the interpreter, which knows no assembly) its twin
    loads from ``table_ptr``.
    """
    index = code.to(tl.int32)
    if TABLE == "":
        found = tl.load(table_ptr + (index & 15))
    else:
        # The operand is always 0. Triton doesn't see that, so it keeps the entries along with the codes and moves both
        # into the layout of a dot operand; LLVM does, and computes them once, before the loop.
        entry = tl.inline_asm_elementwise(TABLE, "=r,r", [index >> 8], dtype=tl.int32, is_pure=True, pack=1)
        found = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
            "=r,r,r",
            [entry, index],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return found


@triton.jit
def bits_of(code, DTYPE: tl.constexpr):
    """Return E2M1 codes as DTYPE × 2^-126 (bfloat16) or × 2^-14 (float16): exponent and fraction are put in place."""
    wide = code.to(tl.int16)
    if DTYPE == tl.bfloat16:
        value = (((wide & 8) << 12) | ((wide & 7) << 6)).to(tl.bfloat16, bitcast=True)
    else:
        value = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)
    return value


@triton.jit
def integer_of(code, BASE: tl.constexpr, DTYPE: tl.constexpr):
    """Return code − BASE in DTYPE: the code is laid into the fraction of 128 or 1024, which is then taken away."""
    wide = code.to(tl.int16)
    if DTYPE == tl.bfloat16:
        raised = (wide | 0x4300).to(tl.bfloat16, bitcast=True)
        taken = tl.full([1, 1], 128 + BASE, tl.float32)
    else:
        raised = (wide | 0x6400).to(tl.float16, bitcast=True)
        taken = tl.full([1, 1], 1024 + BASE, tl.float32)
    return subtract(raised, narrow(taken, DTYPE))
