"""Kernels of spiking networks: membranes that fire into bits, the list of who fired, and what synapses add to a ring.

These are the operations of spiking networks of q4_programs.Op, which says what bits, rings and the clock are. Rows are
R samples; a ring's slot has R rows.

Numbers are those of the CPU, bit for bit: each product and each sum is rounded by itself (compiled without fusion),
and what reaches a slot is added by source, then by synapse. For that, one program has a stretch of targets for itself
and goes through the sources that fired, one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["advance", "list_fired", "move", "pack", "send", "unpack"]

SUBTRACT = tl.constexpr(1)


@triton.jit
def _ones(word):
    """Return how many bits of int64 words are set."""
    found = word - ((word >> 1) & 0x5555555555555555)
    found = (found & 0x3333333333333333) + ((found >> 2) & 0x3333333333333333)
    found = (found + (found >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((found * 0x0101010101010101) >> 56) & 0x7F


@triton.jit
def advance(
    mem_ptr, current_ptr, ring_ptr, clock_ptr, beta_ptr, gain_ptr, leak_ptr, threshold_ptr, reset_ptr, count_ptr,
    before_ptr, wait_ptr, bits_ptr,
    C, R, slots, bits_slots, mem_stride, current_stride, ring_stride, threshold_stride, count_stride, before_stride,
    bits_stride, beta_step, gain_step, leak_step, threshold_step, reset_step, wait_step,
    WORDS: tl.constexpr, INTEGRATE: tl.constexpr, RING: tl.constexpr, GIVEN: tl.constexpr, GAIN: tl.constexpr,
    LEAK: tl.constexpr, FIRE: tl.constexpr, RESET: tl.constexpr, INCLUSIVE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Advance WORDS × 64 membranes of a row: INTEGRATE, FIRE, or the one and then the other; see q4_programs.Op.

    The current is what is given, or what a ring has for this round, whose slot becomes zero, or the sum of the two.
    A vector has one number (step 0), or one for each column (step 1).
    """
    now = tl.load(clock_ptr)
    row = tl.program_id(1)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, 64)
    n = word[:, None] * 64 + lane[None, :]
    here = n < C
    place = mem_ptr + row.to(tl.int64) * mem_stride + n
    mem = tl.load(place, mask=here, other=0.0)
    if INTEGRATE:
        current = tl.zeros([WORDS, 64], tl.float32)
        if GIVEN:
            current = tl.load(current_ptr + row.to(tl.int64) * current_stride + n, mask=here, other=0.0)
        if RING:
            at = ring_ptr + ((now % slots) * R + row) * ring_stride + n
            arrived = tl.load(at, mask=here, other=0.0)
            tl.store(at, tl.zeros([WORDS, 64], tl.float32), mask=here)
            current = current + arrived if GIVEN else arrived
        if GAIN:
            current = tl.load(gain_ptr + n * gain_step, mask=here, other=0.0) * current
        mem = tl.load(beta_ptr + n * beta_step, mask=here, other=0.0) * mem + current
        if LEAK:
            mem = mem + tl.load(leak_ptr + n * leak_step, mask=here, other=0.0)
    if FIRE:
        limit = threshold_ptr + row.to(tl.int64) * threshold_stride + n * threshold_step
        threshold = tl.load(limit, mask=here, other=0.0)
        fired = (mem >= threshold if INCLUSIVE else mem > threshold) & here
        if WAIT:
            counted = count_ptr + row.to(tl.int64) * count_stride + n
            count = tl.load(counted, mask=here, other=0.0)
            held = count > 0
            before = tl.load(before_ptr + row.to(tl.int64) * before_stride + n, mask=here, other=0.0)
            mem = tl.where(held, before, mem)
            fired = fired & (count <= 0)
            steps = tl.load(wait_ptr + n * wait_step, mask=here, other=0.0)
            left = tl.where(count - 1 < 0, 0.0, count - 1)
            tl.store(counted, tl.where(fired, steps, left), mask=here)
        if RESET != 0:
            reset = tl.load(reset_ptr + n * reset_step, mask=here, other=0.0)
            if RESET == SUBTRACT:
                mem = mem - reset * fired.to(tl.float32)
            else:
                mem = tl.where(fired, reset, mem)
        bits = tl.sum(fired.to(tl.int64) << lane[None, :].to(tl.int64), axis=1)
        tl.store(bits_ptr + ((now % bits_slots) * R + row) * bits_stride + word, bits, mask=word * 64 < C)
    tl.store(place, mem, mask=here)


@triton.jit
def move(
    ring_ptr, x_ptr, clock_ptr, C, R, slots, ring_stride, x_stride, lag, BLOCK: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """TAKE (0), ROW (1) or STORE_ROW (2) of BLOCK columns of a row."""
    now = tl.load(clock_ptr) - lag
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = n < C
    at = ring_ptr + ((now + slots) % slots * R + row) * ring_stride + n
    x = x_ptr + row.to(tl.int64) * x_stride + n
    if KIND == 2:
        tl.store(at, tl.load(x, mask=here), mask=here)
    else:
        tl.store(x, tl.load(at, mask=here), mask=here)
    if KIND == 0:
        tl.store(at, tl.zeros([BLOCK], tl.float32), mask=here)


@triton.jit
def pack(
    x_ptr, clock_ptr, bits_ptr, odd_ptr, C, R, slots, odd_slots, x_stride, bits_stride, odd_stride, WORDS: tl.constexpr
):  # fmt: skip
    """PACK of WORDS × 64 columns of a row."""
    now = tl.load(clock_ptr)
    row = tl.program_id(1)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, 64)
    n = word[:, None] * 64 + lane[None, :]
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + n, mask=n < C, other=0.0)
    shift = lane[None, :].to(tl.int64)
    ones = tl.sum((x != 0).to(tl.int64) << shift, axis=1)
    odd = tl.sum(((x != 0) & (x != 1)).to(tl.int64) << shift, axis=1)
    here = word * 64 < C
    tl.store(bits_ptr + ((now % slots) * R + row) * bits_stride + word, ones, mask=here)
    tl.store(odd_ptr + ((now % odd_slots) * R + row) * odd_stride + word, odd, mask=here)


@triton.jit
def unpack(
    bits_ptr, clock_ptr, x_ptr, C, R, words, slots, bits_stride, x_stride, lag, WORDS: tl.constexpr
):  # fmt: skip
    """UNPACK of WORDS × 64 columns of a row; zeros behind the last word."""
    now = tl.load(clock_ptr) - lag
    row = tl.program_id(1)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, 64)
    n = word[:, None] * 64 + lane[None, :]
    bits = tl.load(bits_ptr + ((now + slots) % slots * R + row) * bits_stride + word, mask=word < words, other=0)
    ones = (bits[:, None] >> lane[None, :].to(tl.int64)) & 1
    tl.store(x_ptr + row.to(tl.int64) * x_stride + n, ones.to(tl.float32), mask=n < C)


@triton.jit
def list_fired(
    bits_ptr, clock_ptr, list_ptr, number_ptr, C, words, list_stride, bits_stride, slots, R, lag, WORDS: tl.constexpr
):  # fmt: skip
    """List the columns whose bits were set ``lag`` rounds ago, by number, for each row: [R, list_stride].

    Bits behind the last column count for nothing, whatever they are: they would lead out of all tables.
    """
    now = tl.load(clock_ptr) - lag
    row = tl.program_id(0)
    base = bits_ptr + ((now + slots) % slots * R + row) * bits_stride
    total = tl.zeros([], tl.int32)
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        bits = tl.load(base + word, mask=word < words, other=0)
        left = C - word * 64
        ends = (tl.full([WORDS], 1, tl.int64) << tl.minimum(tl.maximum(left, 0), 63).to(tl.int64)) - 1
        bits = tl.where(left >= 64, bits, bits & ends)
        ones = _ones(bits).to(tl.int32)
        start = total + tl.cumsum(ones, 0) - ones
        most = tl.max(ones, 0)
        for rank in range(most):
            lowest = bits & -bits
            source = word * 64 + _ones(lowest - 1).to(tl.int32)
            tl.store(list_ptr + row.to(tl.int64) * list_stride + start + rank, source, mask=rank < ones)
            bits = bits & (bits - 1)
        total += tl.sum(ones, 0)
    tl.store(number_ptr + row, total)


@triton.jit
def send(
    list_ptr, number_ptr, clock_ptr, cut_ptr, index_ptr, codes_ptr, levels_ptr, steps_ptr, rank_ptr, ring_ptr,
    R, slots, parts, list_stride, ring_stride, lag, ranks,
    SHORT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """SEND: add the weights of all sources that fired to a ring, where targets lie in this program's stretch.

    ``cut`` [sources, parts + 1] has where each stretch begins among a source's synapses, which are sorted by target.
    Synapses that share source, target and delay have ranks, and are added in their order.
    """
    now = tl.load(clock_ptr) - lag
    part, row = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, LANES)
    count = tl.load(number_ptr + row)
    for fired in range(count):
        source = tl.load(list_ptr + row.to(tl.int64) * list_stride + fired).to(tl.int64)
        cut = cut_ptr + source * (parts + 1) + part
        first, last = tl.load(cut), tl.load(cut + 1)
        for begin in range(first, last, LANES):
            at = begin + lane
            here = at < last
            target = tl.load(index_ptr + at, mask=here, other=0).to(tl.int64)
            if SHORT:
                target = target & 0xFFFF
            code = (tl.load(codes_ptr + (at >> 1), mask=here, other=0).to(tl.int32) >> ((at & 1) * 4).to(tl.int32)) & 15
            scale = tl.load(levels_ptr + at // BLOCK * 2, mask=here, other=0.0).to(tl.float32)
            offset = tl.load(levels_ptr + at // BLOCK * 2 + 1, mask=here, other=0.0).to(tl.float32)
            weight = offset + scale * code.to(tl.float32)
            steps = tl.load(steps_ptr + at, mask=here, other=0).to(tl.int64)
            here = here & (steps > 0)
            slot = ((now + steps) % slots + slots) % slots
            place = ring_ptr + (slot * R + row) * ring_stride + target
            if RANKS:
                own = tl.load(rank_ptr + at, mask=here, other=0).to(tl.int32)
                for rank in range(ranks):
                    mine = here & (own == rank)
                    tl.store(place, tl.load(place, mask=mine, other=0.0) + weight, mask=mine)
                    tl.debug_barrier()
            else:
                tl.store(place, tl.load(place, mask=here, other=0.0) + weight, mask=here)
                tl.debug_barrier()
