"""How networks of actors lay out what they share: what a population gives in a step, and its state.

Spikes are bits: each sample has 64-bit words of its own, a bit for each neuron, the lowest first. Other numbers are
as they are. The row of the n-th step lies at ``(n - 1) % slots`` of a ring. A state is one tensor of 64-bit words: the
clock, the neurons' tensors and those of what is on its way, each from a word on, then what the population gave in its
last steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Layout", "Row"]

_WORD_BYTES, _WORD_BITS = 8, 64


@attrs.frozen
class Row:
    """The form of what a population gives in a step.

    Args:
        batch: B, samples.
        size: n, neurons.
        is_binary: Whether it is spikes, which become bits.
        dtype: Of the numbers.
    """

    batch: int
    size: int
    is_binary: bool
    dtype: torch.dtype

    @property
    def words(self) -> int:
        """The number of 64-bit words."""
        if self.is_binary:
            return self.batch * -(-self.size // _WORD_BITS)
        return -(-self.batch * self.size * self.dtype.itemsize // _WORD_BYTES)

    def write(self, rows: torch.Tensor, given: torch.Tensor) -> None:
        """Write what was given [..., B, n] to rows int64 [..., words]."""
        lead = given.shape[:-2]
        if self.is_binary:
            bits = np.packbits(given.cpu().numpy() != 0, axis=-1, bitorder="little")
            places = rows.view(torch.uint8).view(*lead, self.batch, -1).numpy()
            places[..., : bits.shape[-1]] = bits
        else:
            numbers = rows.view(self.dtype)[..., : self.batch * self.size]
            numbers.copy_(given.reshape(*lead, -1))

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what was given, [..., B, n] on the CPU, from rows int64 [..., words]."""
        lead = rows.shape[:-1]
        if not self.is_binary:
            return rows.view(self.dtype)[..., : self.batch * self.size].reshape(*lead, self.batch, self.size).clone()
        bits = rows.view(torch.uint8).view(*lead, self.batch, -1).numpy()
        return torch.from_numpy(np.unpackbits(bits, axis=-1, count=self.size, bitorder="little")).to(self.dtype)


class Layout:
    """The form of a population's state.

    Args:
        tensors: Those at rest.
        depth: How many of its last rows belong to it.
        words: Of a row.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], depth: int, words: int) -> None:
        self._forms = [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors]
        self._depth, self._words = depth, words
        sizes = [-(-math.prod(shape) * dtype.itemsize // _WORD_BYTES) for shape, dtype, _ in self._forms]
        self.size = 1 + sum(sizes) + depth * words
        """The number of 64-bit words."""

    def write(self, state: torch.Tensor, clock: int, tensors: Sequence[torch.Tensor], ring: torch.Tensor) -> None:
        """Write a state after ``clock`` steps; the rows are those of a ring [slots, words]."""
        state[0] = clock
        at = 1
        for tensor, (shape, dtype, _) in zip(tensors, self._forms, strict=True):
            view, at = self._view(state, at, shape, dtype)
            view.copy_(tensor)
        state[at:].view(self._depth, self._words).copy_(ring[self._places(clock, len(ring))])

    def read(self, state: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        """Return clock and tensors, which are copies, each on its device."""
        tensors, at = [], 1
        for shape, dtype, device in self._forms:
            view, at = self._view(state, at, shape, dtype)
            tensors.append(view.to(device, copy=True))
        return int(state[0]), tensors

    def restore(self, state: torch.Tensor, ring: torch.Tensor) -> None:
        """Write the rows of a state to a ring."""
        rows = state[self.size - self._depth * self._words :].view(self._depth, self._words)
        ring[self._places(int(state[0]), len(ring))] = rows.cpu()

    def _places(self, clock: int, slots: int) -> list[int]:
        return [step % slots for step in range(clock - self._depth, clock)]

    def _view(
        self, state: torch.Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, int]:
        count = math.prod(shape)
        end = at + -(-count * dtype.itemsize // _WORD_BYTES)
        return state[at:end].view(dtype)[:count].view(shape), end
