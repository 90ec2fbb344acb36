"""The faults planted in the toy provider of pretended managed memory."""

from __future__ import annotations

import torch

from q4_conformance_faults.fault import ProviderFault
from q4_conformance_faults.toy_provider import ATTRIBUTES, ToyProvider
from q4core import memory

__all__ = ["PROVIDER_FAULTS"]


class CallsAllManaged(ToyProvider):
    """Calls any memory managed."""

    def is_managed(self, tensor: torch.Tensor) -> bool:
        del tensor
        return True


class ForgetsItsOwn(ToyProvider):
    """Hands out ordinary memory, and does not call it managed."""

    def is_managed(self, tensor: torch.Tensor) -> bool:
        del tensor
        return False


class CopiesStorage(ToyProvider):
    """Copies bytes in the order in which they are stored, whatever the strides."""

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        flat = tensor.as_strided((tensor.numel(),), (1,))
        managed = super().to_managed(flat, device=device, read_mostly=read_mostly, prefetch=prefetch)
        return managed.view(tensor.shape)


class HandsBackTheSource(ToyProvider):
    """Calls the source's own memory managed, instead of copying it."""

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        del device, read_mostly, prefetch
        self._addresses.add(tensor.untyped_storage().data_ptr())
        return tensor


class EmptiesTheSource(ToyProvider):
    """Moves instead of copying: the source is zero afterwards."""

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        managed = super().to_managed(tensor, device=device, read_mostly=read_mostly, prefetch=prefetch)
        tensor.zero_()
        return managed


class WidensFloats(ToyProvider):
    """Gives 16-bit floats back in 32 bits."""

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        wide = tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
        return super().to_managed(wide, device=device, read_mostly=read_mostly, prefetch=prefetch)


class ReusesOneArea(ToyProvider):
    """Hands the same memory out again while it is in use."""

    _area: torch.Tensor | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._area is None:
            self._area = super().empty((1 << 22,), torch.uint8, device)
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._area[:size].view(dtype).view(shape)


class KeepsMemory(ToyProvider):
    """Keeps whatever it has handed out."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: list[torch.Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = super().empty(shape, dtype, device)
        self._kept.append(tensor)
        return tensor


class RaisesWhenAsked(ToyProvider):
    """Raises where it should say no."""

    def is_available(self, device: torch.device) -> memory.Availability:
        if device.type != "cpu":
            raise OSError("libcuda.so.1: cannot open shared object file")
        return super().is_available(device)


class RefusesWithoutFacts(ToyProvider):
    """Says no, and not by which attributes."""

    def is_available(self, device: torch.device) -> memory.Availability:
        answer = super().is_available(device)
        return answer or memory.Availability(is_available=False, reason=answer.reason)


class PromisesEverywhere(ToyProvider):
    """Offers memory for devices that are not there."""

    def is_available(self, device: torch.device) -> memory.Availability:
        del device
        return memory.Availability(is_available=True, reason="always", attributes=ATTRIBUTES)


class PrefetchesByCopy(ToyProvider):
    """Makes a second copy in order to prefetch."""

    def prefetch(self, tensor: torch.Tensor, device: torch.device) -> None:
        tensor.clone().to(device)


class CopiesWholePages(ToyProvider):
    """Copies what fills whole pages, and forgets the rest."""

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        del read_mostly, prefetch
        managed = self.empty(tuple(tensor.shape), tensor.dtype, device)
        whole = tensor.nbytes // 4096 * 4096 // tensor.element_size()
        managed.view(-1)[:whole] = tensor.reshape(-1)[:whole]
        return managed


class ChangesItsMind(ToyProvider):
    """Says no when it is asked first, and yes from then on."""

    _asked = 0

    def is_available(self, device: torch.device) -> memory.Availability:
        self._asked += 1
        if self._asked == 1:
            return memory.Availability(is_available=False, reason="not yet", attributes={"managedMemory": 0})
        return super().is_available(device)


class RefusesSmall(ToyProvider):
    """Has no memory for what is smaller than a page."""

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        if tensor.nbytes < 4096:  # noqa: PLR2004  # a page
            raise RuntimeError("cudaErrorInvalidValue")
        return super().to_managed(tensor, device=device, read_mostly=read_mostly, prefetch=prefetch)


PROVIDER_FAULTS: tuple[ProviderFault, ...] = tuple(
    ProviderFault(name=f"fault-{name}", make=make, caught_by=case, says=says)
    for name, make, case, says in (
        ("calls-all-managed", CallsAllManaged, "TC-21/convert", "ordinary memory is called managed"),
        ("forgets-its-own-memory", ForgetsItsOwn, "TC-21/convert", "does not call its own memory managed"),
        ("copies-storage-not-values", CopiesStorage, "TC-21/convert", "transposed: other data"),
        ("hands-back-the-source", HandsBackTheSource, "TC-21/convert", "shares memory with its source"),
        ("empties-the-source", EmptiesTheSource, "TC-21/convert", "the source was written"),
        ("widens-floats", WidensFloats, "TC-21/convert", "became torch.float32"),
        ("reuses-one-area", ReusesOneArea, "TC-21/empty", "share memory"),
        ("keeps-managed-memory", KeepsMemory, "TC-21/empty", "memory grew by"),
        ("raises-when-asked", RaisesWhenAsked, "TC-07/capability", "is_available raised OSError"),
        ("refuses-without-facts", RefusesWithoutFacts, "TC-07/capability", "names no device attribute"),
        ("promises-everywhere", PromisesEverywhere, "TC-07/capability", "is not there"),
        ("copies-whole-pages", CopiesWholePages, "TC-07/promoted", "wrong numbers in managed memory"),
        ("changes-its-mind", ChangesItsMind, "TC-08/refused", "was served without managed memory"),
        ("refuses-small-tensors", RefusesSmall, "TC-22/mutable", "fallback: "),
        ("prefetches-by-copy", PrefetchesByCopy, "TC-23/storage", "elements were made"),
    )
)
