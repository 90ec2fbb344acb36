"""Exact results of the operations of spiking networks, bit for bit: float32 of numpy, rounded one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from q4_programs import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from q4_programs import SparseWeight

__all__ = ["exact_spiking", "synapses_of"]

Array: TypeAlias = "NDArray[Any]"
Synapses: TypeAlias = "list[list[tuple[int, np.float32, int]]]"

_WORD = 64
_SUBTRACTS, _SETS = 1, 2


def synapses_of(weight: SparseWeight) -> Synapses:
    """Return target, weight and delay of each synapse of each source, read entry by entry."""
    starts, first, gaps, steps, codes, levels = (tensor.cpu().numpy() for tensor in weight.tensors())
    gaps = gaps.view(np.uint16) if gaps.dtype == np.int16 else gaps
    numbers = levels.view(np.float16).astype(np.float32)
    found: Synapses = []
    for source in range(weight.sources):
        target, items = int(first[source]), []
        for entry in range(int(starts[source]), int(starts[source + 1])):
            target += int(gaps[entry])
            code = np.float32(codes[entry // 2] >> entry % 2 * 4 & 15)
            scale, offset = numbers[entry // 32]
            if steps[entry]:
                items.append((target, offset + scale * code, int(steps[entry])))
        found.append(items)
    return found


def exact_spiking(
    op: Op, numbers: Sequence[float], inputs: Sequence[Array], outputs: Sequence[Array], synapses: Synapses
) -> None:
    """Write an operation's results to its outputs; those that are an input as well are given as both.

    Args:
        op: INTEGRATE, FIRE, SEND, TAKE, ROW, STORE_ROW, PACK or UNPACK.
        numbers: Its options.
        inputs: float32 and int64 [rows, columns].
        outputs: Likewise.
        synapses: Those of SEND.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        _EXACT[op]([int(number) for number in numbers], inputs, outputs, synapses)


def _slot(ring: Array, clock: Array, rows: int, ago: int = 0) -> Array:
    """Return the rows of a ring that a round has."""
    first = (int(clock[0, 0]) - ago) % (len(ring) // rows) * rows
    return ring[first : first + rows]


def _bits(ones: Array) -> Array:
    words = np.zeros((len(ones), -(-ones.shape[1] // _WORD)), np.uint64)
    for row, column in np.argwhere(ones):
        words[row, column // _WORD] |= np.uint64(1) << np.uint64(column % _WORD)
    return words.view(np.int64)


def _ones(words: Array, columns: int) -> Array:
    column = np.arange(columns)
    shifted = words.view(np.uint64)[:, column // _WORD] >> (column % _WORD).astype(np.uint64)
    found: Array = shifted & np.uint64(1) != 0
    return found


def _integrate(_: list[int], inputs: Sequence[Array], outputs: Sequence[Array], __: Synapses) -> None:
    x, current, beta, *more = inputs
    held, added = beta * x, more[0] * current if more else current
    total = held + added
    outputs[0][:] = total + more[1] if len(more) > 1 else total


def _fire(numbers: list[int], inputs: Sequence[Array], outputs: Sequence[Array], _: Synapses) -> None:
    mem, threshold, vector, clock, *refractory = inputs
    reset, inclusive = numbers
    before = mem.copy()
    rows, columns = mem.shape
    fired = np.zeros(mem.shape, bool)
    for row, column in np.ndindex(rows, columns):
        limit = np.broadcast_to(threshold, mem.shape)[row, column]
        level = np.broadcast_to(vector, mem.shape)[row, column]
        if refractory and refractory[0][row, column] > 0:
            mem[row, column] = refractory[1][row, column]
            refractory[0][row, column] -= np.float32(1)
            continue
        value = before[row, column]
        if value > limit or (inclusive and value == limit):
            fired[row, column] = True
            mem[row, column] = {_SUBTRACTS: value - level, _SETS: level}.get(reset, value)
            if refractory:
                refractory[0][row, column] = np.broadcast_to(refractory[2], mem.shape)[row, column]
    _slot(outputs[0], clock, rows)[:] = _bits(fired)


def _send(numbers: list[int], inputs: Sequence[Array], outputs: Sequence[Array], synapses: Synapses) -> None:
    words, clock, ring = inputs[0], inputs[1], outputs[0]
    ago, rows = numbers
    slots = len(ring) // rows
    ones = _ones(_slot(words, clock, rows, ago), len(synapses))
    for row in range(rows):
        for source in np.flatnonzero(ones[row]):
            for target, weight, delay in synapses[source]:
                ring[(int(clock[0, 0]) - ago + delay) % slots * rows + row, target] += weight


def _take(_: list[int], inputs: Sequence[Array], outputs: Sequence[Array], __: Synapses) -> None:
    slot = _slot(inputs[0], inputs[1], len(outputs[0]))
    outputs[0][:] = slot
    slot[:] = 0


def _row(numbers: list[int], inputs: Sequence[Array], outputs: Sequence[Array], _: Synapses) -> None:
    outputs[0][:] = _slot(inputs[0], inputs[1], len(outputs[0]), *numbers)


def _store_row(_: list[int], inputs: Sequence[Array], outputs: Sequence[Array], __: Synapses) -> None:
    _slot(outputs[0], inputs[1], len(inputs[0]))[:] = inputs[0]


def _pack(_: list[int], inputs: Sequence[Array], outputs: Sequence[Array], __: Synapses) -> None:
    x, clock = inputs
    for words, ones in zip(outputs, (x != 0, (x != 0) & (x != 1)), strict=True):
        _slot(words, clock, len(x))[:] = _bits(ones)


def _unpack(numbers: list[int], inputs: Sequence[Array], outputs: Sequence[Array], _: Synapses) -> None:
    rows, columns = outputs[0].shape
    outputs[0][:] = _ones(_slot(inputs[0], inputs[1], rows, *numbers), columns)


_EXACT: dict[Op, Callable[[list[int], Sequence[Array], Sequence[Array], Synapses], None]] = {
    Op.INTEGRATE: _integrate,
    Op.FIRE: _fire,
    Op.SEND: _send,
    Op.TAKE: _take,
    Op.ROW: _row,
    Op.STORE_ROW: _store_row,
    Op.PACK: _pack,
    Op.UNPACK: _unpack,
}
