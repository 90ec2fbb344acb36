"""The keys and values of several sequences, each in rows of its own, so that a program takes tokens of any of them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch

from q4_nn.blocks.rows import RowPlaces
from q4_programs import Op
from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from q4_programs import ProgramBuilder, Value

__all__ = ["BatchCache", "BatchPlaces"]


class BatchCache:
    """Keys and values of every layer for some sequences of up to ``capacity`` positions each.

    A position is a row of all heads, and sequence s has the rows from ``s · capacity`` on. A layer with a window has as
    many rows as one without.

    Args:
        layers: Number of layers.
        heads: Key-value heads.
        head_dim: Features of a head.
        capacity: Positions of a sequence.
        batch: Sequences.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, capacity: int, batch: int) -> None:
        # No row is read before it is written, and what is not written takes no memory. Huge pages would.
        self.entries = torch.empty((2, layers, batch * capacity, heads * head_dim))
        self.heads, self.capacity, self.batch = heads, capacity, batch
        self.lengths = [0] * batch
        """How many positions each sequence has."""
        self.programs: dict[type, Any] = {}
        """The programs over this cache that are made, by their class."""

    @property
    def device(self) -> torch.device:
        """Where it is: the CPU, as programs of spans run there."""
        return self.entries.device

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.entries.numel() * self.entries.element_size()

    def of(self, sequence: int, layer: int) -> torch.Tensor:
        """Return the keys and values of a sequence in a layer, up to its length: a view, [2, heads, S, head_dim]."""
        first = sequence * self.capacity
        rows = self.entries[:, layer, first : first + self.lengths[sequence]]
        return rows.view(*rows.shape[:2], self.heads, rows.shape[2] // self.heads).transpose(1, 2)


class BatchPlaces(RowPlaces):
    """Tokens of several sequences in a program: each is a row, which goes to its own place in a cache.

    Args:
        builder: Collects; its steps are of ``most`` tokens.
        cache: Where keys and values go, and what is seen of them.
        most: Tokens of a run at most.
    """

    def __init__(self, builder: ProgramBuilder, cache: BatchCache, most: int) -> None:
        super().__init__(builder, most, cache.capacity)
        self._cache = cache
        self.tokens = builder.bound(self._numbers(most), "tokens")
        self._rows = builder.bound(self._numbers(most), "rows of the cache")

    def seen(self, layer: int, key: Value, value: Value) -> tuple[Value, Value]:
        """Store the rows' keys and values, and return the cache's [batch · capacity, heads · head_dim]."""
        builder, entries = self._builder, self._cache.entries
        whole, (layers, room) = builder.bound(entries, "keys and values"), entries.shape[1:3]
        keys, values = (builder.rows(whole, (part * layers + layer) * room, room) for part in (0, 1))
        builder.step(Op.STORE, key, self._rows, out=keys)
        builder.step(Op.STORE, value, self._rows, out=values)
        return keys, values

    def take(self, parts: Iterable[tuple[int, Sequence[int]]]) -> int:
        """Write the numbers of a run, and return how many tokens it has.

        Args:
            parts: Sequences and the tokens that follow theirs, at most ``most`` in all, each sequence once.

        Raises:
            InputError: The cache has no room for them.
        """
        positions, tokens, rows, *spans = self._cells
        windows = [window for _, window in self._spans]
        at = 0
        for sequence, given in parts:
            length, count, first = self._cache.lengths[sequence], len(given), sequence * self.capacity
            if length + count > self.capacity:
                rule = f"at most {self.capacity - length} more (capacity {self.capacity})"
                raise InputError("key-value cache", name="tokens", rule=rule, value=count)
            own, start, to = array("q", range(length, length + count)), first + length, slice(at, at + count)
            positions[to], tokens[to], rows[to] = own, array("q", given), array("q", range(start, start + count))
            for cells, window in zip(spans, windows, strict=True):
                seen = [first] * count if window is None else [first + max(0, place + 1 - window) for place in own]
                cells[2 * at : 2 * (at + count) : 2] = array("q", seen)
                cells[2 * at + 1 : 2 * (at + count) : 2] = array("q", range(start + 1, start + count + 1))
            at += count
        return at

    def advance(self, parts: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Count the tokens of a run as written."""
        for sequence, given in parts:
            self._cache.lengths[sequence] += len(given)
