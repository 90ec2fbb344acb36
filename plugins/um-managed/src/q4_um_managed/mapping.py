"""``MappedMemory``: system memory that a GPU reads in place, held until the GPU has done so."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4_um_managed.driver import Driver
    from q4core.memory import Placement

__all__ = ["MappedMemory"]


class MappedMemory:
    """A CPU tensor's memory behind a CUDA tensor, whose storage owns this object.

    Args:
        tensor: The CPU tensor.
        driver: CUDA's runtime.
        device: The number of the device that reads it.
        placement: ``"pageable"``, and the attribute that allowed it.
    """

    __slots__ = ("_device", "_driver", "_process", "_tensor", "placement")

    is_given_back = False
    """Always False, as it can't be given back: the memory goes with its last tensor."""
    retained: list[torch.Tensor] = []  # noqa: RUF012  # one list for the process
    """Tensors released during the capture of a graph, whose replays may read them: the device can't be awaited then."""

    def __init__(self, tensor: torch.Tensor, driver: Driver, device: int, placement: Placement) -> None:
        self._tensor, self._driver, self._device, self.placement = tensor, driver, device, placement
        self._process = os.getpid()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Wait for the device: unmapping memory under a kernel would end the process."""
        if is_exiting() or os.getpid() != self._process:
            return
        with contextlib.suppress(Exception):
            if self._driver.is_capturing(self._device):
                self.retained.append(self._tensor)
                return
            self._driver.synchronise(self._device)
            return
        self.retained.append(self._tensor)
