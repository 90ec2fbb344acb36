"""``ToyProvider``: a right provider of pretended managed memory on the CPU, whole in one module.

On a machine without such memory, what a provider promises about addresses, bytes and lifetimes can be judged all the
same: it is the same contract. ``Q4_PLUGIN_MODULES`` may name the module.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from q4core import MemoryProvider, hookimpl, memory

__all__ = ["ATTRIBUTES", "ToyProvider", "q4_memory_providers"]

ATTRIBUTES = {"concurrentManagedAccess": 1, "pageableMemoryAccess": 0}


class ToyProvider:
    """The provider; planted faults override single methods.

    Args:
        name: Its name.
    """

    def __init__(self, name: str = "toy-memory") -> None:
        self.name = name
        self._addresses: set[int] = set()

    def is_available(self, device: torch.device) -> memory.Availability:
        """Offer memory to the CPU."""
        if device.type == "cpu":
            return memory.Availability(True, "pretended", ATTRIBUTES)  # noqa: FBT003  # as the contract has it
        return memory.Availability(False, f"nothing for {device}", {"cuda_available": False})  # noqa: FBT003  # as above

    def is_managed(self, tensor: torch.Tensor) -> bool:
        """Look among what was handed out and lives."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        """Copy."""
        del read_mostly, prefetch
        managed = self.empty(tuple(tensor.shape), tensor.dtype, device)
        return managed.copy_(tensor)

    def prefetch(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Move nothing: there is one memory."""
        del tensor, device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Hand out memory that goes with its last tensor."""
        del device
        count = torch.Size(shape).numel()
        area = np.zeros(max(1, count * dtype.itemsize), np.uint8)  # what a tensor made of it keeps
        self._addresses.add(area.ctypes.data)
        weakref.finalize(area, self._addresses.discard, area.ctypes.data).atexit = False
        return torch.from_numpy(area)[: count * dtype.itemsize].view(dtype).view(shape)

    def free(self, tensor: torch.Tensor) -> None:
        """Leave it to the last reference."""
        del tensor


@hookimpl
def q4_memory_providers() -> list[MemoryProvider]:
    """Bring the provider."""
    return [ToyProvider()]
