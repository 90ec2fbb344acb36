"""Kernels of spiking networks: membranes that fire into bits, the list of who fired, and what synapses add to a ring.

Spikes are bits: neuron n of a row is bit n % 64 of its word n // 64, int64. The clock is one int64 number, the step
that is. A ring of float32 [slots, B, targets] holds what arrives in coming steps, that of step t in slot t % slots.

Numbers are those of the CPU, bit for bit: each product and each sum is rounded by itself (compiled without fusion),
and what reaches a slot is added by source, then by synapse. For that, one program has a stretch of targets for itself
and goes through the sources that fired, one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["advance", "list_fired", "send"]

SUBTRACT, VALUE = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _ones(word):
    """Return how many bits of int64 words are set."""
    found = word - ((word >> 1) & 0x5555555555555555)
    found = (found & 0x3333333333333333) + ((found >> 2) & 0x3333333333333333)
    found = (found + (found >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((found * 0x0101010101010101) >> 56) & 0x7F


@triton.jit
def advance(
    mem_ptr, given_ptr, ring_ptr, clock_ptr, beta_ptr, gain_ptr, leak_ptr, threshold_ptr, reset_ptr, wait_ptr, bits_ptr,
    N, B, words, slots, given_stride, row_stride, bits_slots, beta_step, gain_step, leak_step, threshold_step,
    reset_step, refractory,
    WORDS: tl.constexpr, GIVEN: tl.constexpr, RING: tl.constexpr, GAIN: tl.constexpr, LEAK: tl.constexpr,
    RESET: tl.constexpr, INCLUSIVE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Advance WORDS × 64 membranes by one step: mem ← beta · mem + gain · current + leak; fire; reset; write the bits.

    The current is what is given (a row for each sample, ``row_stride`` apart from step to step), and what arrives now
    from a ring, whose slot becomes zero. Parameters are one number (step 0) or one for each neuron (step 1).
    """
    now = tl.load(clock_ptr)
    sample = tl.program_id(1)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, 64)
    n = word[:, None] * 64 + lane[None, :]
    here = n < N
    place = sample.to(tl.int64) * N + n
    current = tl.zeros([WORDS, 64], tl.float32)
    if GIVEN:
        current = tl.load(given_ptr + now * row_stride + sample.to(tl.int64) * given_stride + n, mask=here, other=0.0)
    if RING:
        at = ring_ptr + (now % slots) * (B.to(tl.int64) * N) + place
        arrived = tl.load(at, mask=here, other=0.0)
        tl.store(at, tl.zeros([WORDS, 64], tl.float32), mask=here)
        current = arrived + current if GIVEN else arrived
    if GAIN:
        current = tl.load(gain_ptr + n * gain_step, mask=here, other=0.0) * current
    before = tl.load(mem_ptr + place, mask=here, other=0.0)
    mem = tl.load(beta_ptr + n * beta_step, mask=here, other=0.0) * before + current
    if LEAK:
        mem = mem + tl.load(leak_ptr + n * leak_step, mask=here, other=0.0)
    threshold = tl.load(threshold_ptr + n * threshold_step, mask=here, other=0.0)
    reset = tl.load(reset_ptr + n * reset_step, mask=here, other=0.0)
    if WAIT:  # at its reset while it waits, and deaf
        left = tl.load(wait_ptr + place, mask=here, other=0)
        mem = tl.where(left > 0, before, mem)
    fired = mem >= threshold if INCLUSIVE else mem > threshold
    fired = fired & here
    if WAIT:
        fired = fired & (left == 0)
        tl.store(wait_ptr + place, tl.where(fired, refractory, tl.maximum(left - 1, 0)), mask=here)
    if RESET == SUBTRACT:
        mem = tl.where(fired, mem - threshold, mem)
    if RESET == VALUE:
        mem = tl.where(fired, reset, mem)
    tl.store(mem_ptr + place, mem, mask=here)
    bits = tl.sum(fired.to(tl.int64) << lane[None, :].to(tl.int64), axis=1)
    row = (now % bits_slots) * B + sample
    tl.store(bits_ptr + row * words + word, bits, mask=word < words)


@triton.jit
def list_fired(
    bits_ptr, clock_ptr, list_ptr, count_ptr, words, list_stride, bits_slots, B, delay,
    WORDS: tl.constexpr, TICK: tl.constexpr,
):  # fmt: skip
    """List the sources whose bits were set ``delay`` steps ago, by number, for each sample: [B, list_stride].

    With TICK, of one sample alone, a step begins here: the clock moves on before.
    """
    now = tl.load(clock_ptr)
    if TICK:
        now += 1
        tl.store(clock_ptr, now)
    sample = tl.program_id(0)
    base = bits_ptr + ((now - delay + bits_slots) % bits_slots * B + sample) * words
    total = tl.zeros([], tl.int32)
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        bits = tl.load(base + word, mask=word < words, other=0)
        ones = _ones(bits).to(tl.int32)
        start = total + tl.cumsum(ones, 0) - ones
        most = tl.max(ones, 0)
        for rank in range(most):
            has = rank < ones
            lowest = bits & -bits
            source = word * 64 + _ones(lowest - 1).to(tl.int32)
            tl.store(list_ptr + sample.to(tl.int64) * list_stride + start + rank, source, mask=has)
            bits = bits & (bits - 1)
        total += tl.sum(ones, 0)
    tl.store(count_ptr + sample, total)


@triton.jit
def send(
    list_ptr, count_ptr, clock_ptr, cut_ptr, index_ptr, codes_ptr, levels_ptr, steps_ptr, rank_ptr, ring_ptr,
    B, targets, slots, parts, list_stride, delay, ranks,
    SHORT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Add the weights of all sources that fired to a ring, where their targets lie in this program's stretch.

    A synapse of ``steps`` s delivers to the slot of step now - delay + s: so many after its source fired.
    ``cut`` [sources, parts + 1] has where each stretch begins among a source's synapses, which are sorted by target.
    Synapses that share source, target and delay have ranks, and are added in their order.
    """
    now = tl.load(clock_ptr) - delay
    part, sample = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, LANES)
    count = tl.load(count_ptr + sample)
    row = B.to(tl.int64) * targets
    ring = ring_ptr + sample.to(tl.int64) * targets
    for fired in range(count):
        source = tl.load(list_ptr + sample.to(tl.int64) * list_stride + fired).to(tl.int64)
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
            slot = (now + steps) % slots
            place = ring + slot * row + target
            if RANKS:
                own = tl.load(rank_ptr + at, mask=here, other=0).to(tl.int32)
                for rank in range(ranks):
                    mine = here & (own == rank)
                    tl.store(place, tl.load(place, mask=mine, other=0.0) + weight, mask=mine)
                    tl.debug_barrier()
            else:
                tl.store(place, tl.load(place, mask=here, other=0.0) + weight, mask=here)
                tl.debug_barrier()
