"""The faults planted in the toy provider of pretended managed memory."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyProvider documents what is overridden

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_conformance_faults.fault import provider_fault
from q4_conformance_faults.toy_provider import ATTRIBUTES, ToyProvider
from q4core import memory

if TYPE_CHECKING:
    from torch import Tensor


@provider_fault("calls-all-managed", "TC-21/convert", "ordinary memory is called managed")
class CallsAllManaged(ToyProvider):
    """Calls any memory managed."""

    def is_managed(self, tensor: Tensor) -> bool:
        return True


@provider_fault("forgets-its-own-memory", "TC-21/convert", "does not call its own memory managed")
class ForgetsItsOwn(ToyProvider):
    """Hands out ordinary memory, and does not call it managed."""

    def is_managed(self, tensor: Tensor) -> bool:
        return False


@provider_fault("copies-storage-not-values", "TC-21/convert", "transposed: other data")
class CopiesStorage(ToyProvider):
    """Copies bytes in the order in which they are stored, for any strides."""

    def to_managed(self, tensor: Tensor, **how: Any) -> Tensor:
        flat = tensor.as_strided((tensor.numel(),), (1,))
        managed = super().to_managed(flat, **how)
        return managed.view(tensor.shape)


@provider_fault("hands-back-the-source", "TC-21/convert", "shares memory with its source")
class HandsBackTheSource(ToyProvider):
    """Calls the source's own memory managed, instead of copying it."""

    def to_managed(self, tensor: Tensor, **how: Any) -> Tensor:
        self._addresses.add(tensor.untyped_storage().data_ptr())
        return tensor


@provider_fault("empties-the-source", "TC-21/convert", "the source was written")
class EmptiesTheSource(ToyProvider):
    """Moves instead of copying: the source is zero afterwards."""

    def to_managed(self, tensor: Tensor, **how: Any) -> Tensor:
        managed = super().to_managed(tensor, **how)
        tensor.zero_()
        return managed


@provider_fault("widens-floats", "TC-21/convert", "became torch.float32")
class WidensFloats(ToyProvider):
    """Gives 16-bit floats back in 32 bits."""

    def to_managed(self, tensor: Tensor, **how: Any) -> Tensor:
        wide = tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
        return super().to_managed(wide, **how)


@provider_fault("reuses-one-area", "TC-21/empty", "share memory")
class ReusesOneArea(ToyProvider):
    """Hands the same memory out again while it is in use."""

    _area: Tensor | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._area is None:
            self._area = super().empty((1 << 22,), torch.uint8, device)
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._area[:size].view(dtype).view(shape)


@provider_fault("keeps-managed-memory", "TC-21/empty", "memory grew by")
class KeepsMemory(ToyProvider):
    """Keeps all that it has handed out."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._held: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = super().empty(shape, dtype, device)
        self._held.append(tensor)
        return tensor


@provider_fault("raises-when-asked", "TC-07/capability", "is_available raised OSError")
class RaisesWhenAsked(ToyProvider):
    """Raises where it should say no."""

    def is_available(self, device: torch.device) -> memory.Availability:
        if device.type != "cpu":
            raise OSError("libcuda.so.1: cannot open shared object file")
        return super().is_available(device)


@provider_fault("refuses-without-facts", "TC-07/capability", "names no device attribute")
class RefusesWithoutFacts(ToyProvider):
    """Says no, and not by which attributes."""

    def is_available(self, device: torch.device) -> memory.Availability:
        answer = super().is_available(device)
        return answer or memory.Availability(is_available=False, reason=answer.reason)


@provider_fault("promises-everywhere", "TC-07/capability", "is not there")
class PromisesEverywhere(ToyProvider):
    """Offers memory for devices that are not there."""

    def is_available(self, device: torch.device) -> memory.Availability:
        return memory.Availability(is_available=True, reason="always", attributes=ATTRIBUTES)


@provider_fault("prefetches-by-copy", "TC-23/storage", "elements were made")
class PrefetchesByCopy(ToyProvider):
    """Makes a second copy in order to prefetch."""

    def prefetch(self, tensor: Tensor, device: torch.device) -> None:
        tensor.clone().to(device)


@provider_fault("copies-whole-pages", "TC-07/promoted", "wrong numbers in managed memory")
class CopiesWholePages(ToyProvider):
    """Copies what fills whole pages, and forgets the rest."""

    def to_managed(self, tensor: Tensor, **how: Any) -> Tensor:
        managed = self.empty(tuple(tensor.shape), tensor.dtype, how["device"])
        whole = tensor.nbytes // 4096 * 4096 // tensor.element_size()
        managed.view(-1)[:whole] = tensor.reshape(-1)[:whole]
        return managed


@provider_fault("changes-its-mind", "TC-08/refused", "was served without managed memory")
class ChangesItsMind(ToyProvider):
    """Says no when it is asked first, and yes from then on."""

    _asked = 0

    def is_available(self, device: torch.device) -> memory.Availability:
        self._asked += 1
        if self._asked == 1:
            return memory.Availability(is_available=False, reason="not yet", attributes={"managedMemory": 0})
        return super().is_available(device)


@provider_fault("refuses-small-tensors", "TC-22/mutable", "fallback: ")
class RefusesSmall(ToyProvider):
    """Has no memory for what is smaller than a page."""

    def to_managed(self, tensor: Tensor, **how: Any) -> Tensor:
        if tensor.nbytes < 4096:  # noqa: PLR2004  # a page
            raise RuntimeError("cudaErrorInvalidValue")
        return super().to_managed(tensor, **how)
