"""Memory providers for tests that have no managed memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from q4_um_managed import apply_input_policy, apply_mutable_policy, apply_policy
from q4core.memory import Availability, MemoryDecision

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "APPLY",
    "ATTRIBUTES",
    "CPU",
    "DISABLED",
    "PREFER",
    "PROVIDERS",
    "REQUIRE",
    "Broken",
    "FakeProvider",
    "weight_tensor",
]


DISABLED = q4.UnifiedMemoryPolicy.DISABLED

PREFER = q4.UnifiedMemoryPolicy.PREFER_UNIFIED

REQUIRE = q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED

ATTRIBUTES = {"concurrentManagedAccess": 1, "pageableMemoryAccess": 0}

CPU = torch.device("cpu")


class FakeProvider:
    """Calls memory that it has handed out managed, and writes down what it was asked."""

    def __init__(self, name: str = "fake", *, is_available: bool = True) -> None:
        self.name = name
        self.calls: list[str] = []
        self.options: dict[str, Any] = {}
        self.freed: list[int] = []
        self._answer = Availability(is_available, "managed memory" if is_available else "no managed memory", ATTRIBUTES)
        self._addresses: set[int] = set()

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declare a tensor's memory managed."""
        self._addresses.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_available(self, device: torch.device) -> Any:
        """Answer as configured."""
        self.calls.append("is_available")
        assert isinstance(device, torch.device)
        return self._answer

    def is_managed(self, tensor: torch.Tensor) -> bool:
        """Look among what was handed out."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        """Copy."""
        self.calls.append("to_managed")
        assert not tensor.requires_grad
        self.options = {"device": device, "read_mostly": read_mostly, "prefetch": prefetch}
        return self.empty(tuple(tensor.shape), tensor.dtype, device).copy_(tensor)

    def prefetch(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Write it down."""
        assert self.is_managed(tensor)
        self.calls.append("prefetch")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Hand out memory."""
        return self.own(torch.empty(shape, dtype=dtype))

    def free(self, tensor: torch.Tensor) -> None:
        """Write it down."""
        self.calls.append("free")
        self.freed.append(tensor.data_ptr())


class Broken(FakeProvider):
    """Fails in one method, by raising or by a wrong answer."""

    def __init__(self, where: str, result: Any = None, name: str = "broken") -> None:
        super().__init__(name)
        self._where, self._result = where, result

    def __getattribute__(self, name: str) -> Any:
        """Return a method that fails, for the one that does."""
        if name.startswith("_") or name != self._where:
            return super().__getattribute__(name)

        def fail(*_: object, **__: object) -> Any:
            if self._result is None:
                raise RuntimeError("cudaErrorUnknown")
            return self._result

        return fail


def weight_tensor() -> torch.Tensor:
    """Return bytes such as a weight has."""
    return torch.arange(6, dtype=torch.uint8).reshape(2, 3)


APPLY: dict[str, Callable[..., tuple[torch.Tensor, MemoryDecision]]] = {
    "weight": apply_policy,
    "mutable": apply_mutable_policy,
    "input": apply_input_policy,
}

PROVIDERS: dict[str, Callable[[], list[FakeProvider]]] = {
    "none": list,
    "unable": lambda: [FakeProvider(is_available=False)],
    "able": lambda: [FakeProvider()],
}
