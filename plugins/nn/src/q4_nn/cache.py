"""The key-value cache: static tensors, written in place, never joined."""

from __future__ import annotations

import torch

from q4core import InputError

__all__ = ["KVCache"]


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
        shape = (layers, batch, heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
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

    def advance(self, count: int) -> None:
        """Count ``count`` positions as written."""
        self.length += count

    def clear(self) -> None:
        """Forget everything; the memory is kept."""
        self.length = 0
