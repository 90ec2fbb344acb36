"""The key-value cache: static tensors, written in place, never joined."""

from __future__ import annotations

from typing import NamedTuple

import torch

from q4core import InputError

__all__ = ["KVCache", "Place"]


class Place(NamedTuple):
    """Where one more position of one sequence goes, in one layer; views of the cache."""

    entry: torch.Tensor
    """[2, heads, head_dim]: the new position's key and value."""
    keys: torch.Tensor
    """[heads, head_dim, length + 1]: columns, the new one last."""
    values: torch.Tensor
    """[heads, length + 1, head_dim]."""


class KVCache:
    """Keys and values of every layer for up to ``capacity`` positions.

    Args:
        layers: Number of layers.
        heads: Key-value heads.
        head_dim: Features of a head.
        capacity: Positions.
        batch: Sequences, all of one length.
        dtype: dtype of keys and values.
        device: Where they live.
    """

    def __init__(  # noqa: PLR0913  # one argument per size
        self,
        layers: int,
        heads: int,
        head_dim: int,
        capacity: int,
        *,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        # In one tensor, so that a position's key and value can be written in one call.
        self._entries = torch.zeros((2, layers, batch, heads, capacity, head_dim), dtype=dtype, device=device)
        self.keys, self.values = self._entries[0], self._entries[1]
        self.batch = batch
        self.capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

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
        """Write new positions of a layer behind ``length`` and return views of everything up to them.

        Args:
            layer: The layer's index.
            keys: [B, T, heads, head_dim].
            values: The same shape.

        Returns:
            Keys and values [B, heads, length + T, head_dim]. ``advance`` moves ``length`` once all layers have written.
        """
        end = self.length + keys.shape[1]
        all_keys, all_values = self.keys[layer], self.values[layer]
        all_keys[:, :, self.length : end] = keys.transpose(1, 2)
        all_values[:, :, self.length : end] = values.transpose(1, 2)
        return all_keys[:, :, :end], all_values[:, :, :end]

    def places(self) -> list[Place]:
        """Return the place of the next position in every layer, for a cache of one sequence.

        One call of ``unbind`` for all layers is a tenth of what slicing each of them costs.
        """
        seen = slice(0, self.length + 1)
        entries = self._entries[:, :, 0, :, self.length].unbind(1)
        keys = self.keys[:, 0, :, seen].transpose(-1, -2).unbind(0)
        values = self.values[:, 0, :, seen].unbind(0)
        return list(map(Place, entries, keys, values))

    def advance(self, count: int) -> None:
        """Count ``count`` positions as written."""
        self.length += count

    def clear(self) -> None:
        """Forget everything; the memory is kept."""
        self.length = 0
