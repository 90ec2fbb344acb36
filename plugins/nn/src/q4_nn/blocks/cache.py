"""The key-value cache: static tensors, written in place, never joined; sliding windows keep what is still seen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from q4_programs.cache_rows import make_rows, narrowed, row_columns, widened
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_programs import ProgramBuilder, Value

__all__ = ["CachePlaces", "KVCache"]

_BOUND = frozenset({"_rows", "keys", "values", "programs"})
"""Attributes of a cache that ``_bind`` makes of the others."""


class CachePlaces:
    """A cache in a program: where each layer's keys and values are, and where the next position goes.

    Args:
        builder: Collects.
        cache: Of one sequence.
        numbers: int64: as many tokens as the builder has steps for, then the positions of each, then their places in
            each window, in the order of ``KVCache.next_places``.
    """

    def __init__(self, builder: ProgramBuilder, cache: KVCache, numbers: Value) -> None:
        if cache.batch != 1 or cache.padding is not None:
            builder.refuse("its cache holds several sequences, or padding")
        self.capacity = cache.capacity
        self._builder, self._cache = builder, cache
        self._numbers = numbers
        self._count = count = builder.most_tokens
        self.tokens = builder.number(numbers, 0, count)
        self.position = builder.number(numbers, count, count)

    def of(self, layer: int) -> tuple[Value, Value, Value]:
        """Return keys and values [heads · room, …] of a layer, and the places of the next positions in them."""
        builder, entries, row, place = self._builder, *self._cache.entries_of(layer)
        whole = builder.bound(entries, "keys and values")
        room = math.prod(entries.shape[-4:-1])
        layers = math.prod(entries.shape[1:-4])
        keys, values = (builder.rows(whole, (part * layers + row) * room, room) for part in (0, 1))
        return keys, values, builder.number(self._numbers, (1 + place) * self._count, self._count)


class _Window:
    """The last positions of a layer that sees no further back, in a buffer of twice their number.

    Args:
        window: Positions that a token sees, its own among them.
        shape: [2, B, heads, capacity, head_dim] of a layer that sees everything.
    """

    def __init__(self, window: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> None:
        two, batch, heads, capacity, head_dim = shape
        self.window = window
        self.room = min(capacity, 2 * window)
        self.entries = make_rows((two, batch, heads, self.room, head_dim), dtype, device)
        self.first = 0
        """Position of the first entry."""
        self._tail: torch.Tensor | None = None

    def write(self, new: torch.Tensor, length: int) -> torch.Tensor:
        """Return [2, B, heads, S, head_dim]: what the new positions [2, B, heads, T, head_dim] see, and they."""
        count = new.shape[3]
        held = length - self.first
        retained = min(held, self.window - 1)
        if held + count > self.room:
            seen = torch.cat((self.entries[..., held - retained : held, :], new), 3)
            if retained + count > self.room:  # a long prompt: stored once every layer has written
                self._tail = seen[..., max(0, retained + count - self.window + 1) :, :]
                return seen
            self.entries[..., :retained, :] = seen[..., :retained, :]
            self.first, held = length - retained, retained
        self.entries[..., held : held + count, :] = new
        return self.entries[..., held - retained : held + count, :]

    @property
    def most(self) -> int | None:
        """How many positions have room at once, whatever was written before; None for all that the cache holds."""
        return self.window + 1 if self.room == 2 * self.window else None

    def place(self, length: int, count: int = 1) -> int:
        """Return where the next positions go; what they do not see is dropped first where there is no room."""
        held = length - self.first
        if held + count > self.room:
            retained = min(held, self.window - 1)
            self.entries[..., :retained, :] = self.entries[..., held - retained : held, :].clone()
            self.first, held = length - retained, retained
        return held

    def advance(self, length: int) -> None:
        """Store what the next position sees, where a prompt did not fit."""
        if self._tail is not None:
            retained = self._tail.shape[3]
            self.entries[..., :retained, :] = self._tail
            self.first, self._tail = length - retained, None

    def clear(self) -> None:
        self.first, self._tail = 0, None


class KVCache:
    """Keys and values of every layer for up to ``capacity`` positions.

    Args:
        layers: Number of layers.
        heads: Key-value heads.
        head_dim: Features of a head.
        capacity: Positions.
        batch: Sequences.
        windows: For each layer, how many positions a token sees (its own among them), or None for all.
        padding: int64 [B]: how many of the first positions of each sequence hold nothing, where prompts of different
            lengths are filled up on the left; or None.
        dtype: Of keys and values: a floating one, or int8 with a float32 scale for each head and position. Those that
            come in another one are rounded to it.
        device: Where they live.

    Raises:
        ConfigError: No cache is of that dtype.
    """

    def __init__(  # noqa: PLR0913  # one argument per size
        self,
        layers: int,
        heads: int,
        head_dim: int,
        capacity: int,
        *,
        batch: int = 1,
        windows: Sequence[int | None] = (),
        padding: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not (dtype.is_floating_point or dtype is torch.int8):
            raise ConfigError("key-value cache", name="dtype", rule="a floating dtype, or int8", value=dtype)
        shape = (2, batch, heads, capacity, row_columns(head_dim, dtype))
        self._windows = {
            layer: _Window(window, shape, dtype, device)
            for layer, window in enumerate(windows)
            if window is not None and window < capacity
        }
        self._full = [layer for layer in range(layers) if layer not in self._windows]
        # In one tensor, so that a position's key and value can be written in one call.
        self._entries = make_rows((2, len(self._full), *shape[1:]), dtype, device)
        self.batch = batch
        self.capacity = capacity
        self.padding = padding
        self.length = 0
        self._bind()

    def _bind(self) -> None:
        """Make what is bound to this cache's own memory: the views, and no program yet."""
        self._rows = {layer: self._entries[:, row] for row, layer in enumerate(self._full)}
        self.keys, self.values = self._entries[0], self._entries[1]
        self.programs: dict[type, Any] = {}
        """The programs over this cache that are made, by their class."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled. A view is not: pickle would give it memory of its own."""
        return {name: value for name, value in vars(self).items() if name not in _BOUND}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy or a pickle."""
        vars(self).update(state)
        self._bind()

    @property
    def dtype(self) -> torch.dtype:
        """dtype of keys and values."""
        return self.keys.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        held = [self._entries, *(window.entries for window in self._windows.values())]
        return sum(entries.numel() * entries.element_size() for entries in held)

    @property
    def start(self) -> int | torch.Tensor:
        """Position of the next token; of each sequence its own where prompts were filled up: int64 [B]."""
        return self.length if self.padding is None else self.length - self.padding

    def require(self, count: int) -> None:
        """Check that ``count`` more positions fit.

        Raises:
            InputError: They don't.
        """
        if self.length + count > self.capacity:
            raise InputError(
                "key-value cache",
                name="tokens",
                rule=f"at most {self.capacity - self.length} more (capacity {self.capacity})",
                value=count,
            )

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new positions of a layer after ``length`` and return everything that they may see, in order.

        Args:
            layer: The layer's index.
            keys: [B, T, heads, head_dim].
            values: The same shape.

        Returns:
            Keys and values [B, heads, S, head_dim] as they are in the cache, the last T of them the new ones.
            ``advance`` moves ``length`` once all layers have written.

        Raises:
            InputError: They don't fit.
        """
        self.require(keys.shape[1])
        end = self.length + keys.shape[1]
        new = (narrowed(part, self.dtype).transpose(1, 2) for part in (keys, values))
        if (window := self._windows.get(layer)) is not None:
            seen = window.write(torch.stack([*new]), self.length)
        else:
            seen = self._rows[layer][..., :end, :]
            for held, part in zip(seen, new, strict=True):
                held[:, :, self.length :] = part
        return widened(seen[0], keys.dtype), widened(seen[1], keys.dtype)

    def entries_of(self, layer: int) -> tuple[torch.Tensor, int, int]:
        """Return the tensor of a layer's keys and values, the layer's row there, and the index in ``next_places``."""
        if (window := self._windows.get(layer)) is not None:
            return window.entries, 0, 1 + [*self._windows].index(layer)
        return self._entries, self._full.index(layer), 0

    @property
    def place_count(self) -> int:
        """The number of places of a position: its own, and one in each window."""
        return 1 + len(self._windows)

    def next_places(self, count: int = 1) -> list[int]:
        """Return the next position, and its place in each window; those of ``count`` positions follow one another.

        Args:
            count: Positions, at most ``most_places``.

        Raises:
            InputError: They don't fit.
        """
        self.require(count)
        return [self.length, *(window.place(self.length, count) for window in self._windows.values())]

    @property
    def most_places(self) -> int | None:
        """How many positions the windows have room for at once; None for all that the cache holds."""
        return min((window.most for window in self._windows.values() if window.most is not None), default=None)

    def seen(self, layer: int) -> torch.Tensor:
        """Return what the next position sees of a layer before it, as it is held: views, [2, B, heads, S, …]."""
        if (window := self._windows.get(layer)) is None:
            return self._rows[layer][..., : self.length, :]
        held = self.length - window.first
        return window.entries[..., max(0, held - window.window + 1) : held, :]

    def restore(self, layer: int, seen: torch.Tensor, length: int) -> None:
        """Take what ``seen`` gave at another ``length``, which the caller sets once all layers have theirs."""
        if (window := self._windows.get(layer)) is None:
            self._rows[layer][..., :length, :] = seen
        else:
            seen = seen[..., max(0, seen.shape[3] - window.window + 1) :, :]
            window.first = length - seen.shape[3]
            window.entries[..., : seen.shape[3], :] = seen

    def advance(self, count: int) -> None:
        """Count ``count`` positions as written."""
        self.length += count
        for window in self._windows.values():
            window.advance(self.length)

    def clear(self) -> None:
        """Drop all positions, without releasing the memory."""
        self.length = 0
        for window in self._windows.values():
            window.clear()
