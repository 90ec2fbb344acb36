"""The subject of memory: a provider of managed memory, on one device."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.outcome import FailureError, NotTestableError
from q4_conformance.subjects.backend import plugin_of
from q4_conformance.subjects.reference import reference_backend
from q4_conformance.subjects.wrappers import Wrapper
from q4core import Registry, default_registry, hookimpl
from q4core import memory as contract
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from q4core import MemoryProvider

_IS_MANAGED = 8
"""CU_POINTER_ATTRIBUTE_IS_MANAGED."""


def driver_says_managed(tensor: torch.Tensor) -> bool:
    """Return whether the CUDA driver calls a tensor's memory managed; NOT_TESTABLE where there is none to ask."""
    name = ctypes.util.find_library("cuda") or "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError as error:
        raise NotTestableError(f"there is no CUDA driver to ask: {error}") from error
    answer = ctypes.c_uint(0)
    status = driver.cuPointerGetAttribute(ctypes.byref(answer), _IS_MANAGED, ctypes.c_uint64(tensor.data_ptr()))
    return status == 0 and bool(answer.value)


def unable_provider(provider: MemoryProvider, reason: str, attributes: dict[str, Any]) -> Any:
    """Return a provider as it is without managed memory, for a reason that device attributes decided."""
    answer = contract.Availability(is_available=False, reason=reason, attributes=attributes)
    return Wrapper(provider, is_available=lambda _: answer)


class CountedProvider(Wrapper):
    """A provider, and the names of its methods that were called, but for the questions, in ``calls``."""

    def __getattr__(self, name: str) -> Any:
        """Count a call, and leave it to the provider."""
        if name in {"to_managed", "prefetch", "empty", "free"}:
            self.calls.append(name)
        return super().__getattr__(name)


class MemorySubject:
    """A provider of managed memory, itself or the name of an installed one, and the device that is to reach the memory.

    Raises:
        LookupError: No provider of that name is installed.
    """

    def __init__(self, provider: MemoryProvider | str, *, device: str = "cpu") -> None:
        if isinstance(provider, str):
            installed: dict[str, MemoryProvider] = {item.name: item for item in default_registry().memory_providers()}
            if provider not in installed:
                there = ", ".join(installed) or "none"
                raise LookupError(f"no memory provider {provider!r} is installed; there are {there}")
            provider = installed[provider]
        self.provider: MemoryProvider = provider
        self.name = provider.name
        self.device = torch.device(device)

    def availability(self) -> contract.Availability:
        """Return the provider's answer for the device; anything else than an ``Availability`` is a failure."""
        try:
            answer: object = self.provider.is_available(self.device)
        except PLUGIN_FAULTS as error:
            raise FailureError(f"is_available raised {describe_exception(error)}") from error
        if not isinstance(answer, contract.Availability):
            raise FailureError(f"is_available must return an Availability, got {type(answer).__name__}")
        return answer

    def require_available(self) -> None:
        """Raise ``NotTestableError`` where the provider says that there is no managed memory here."""
        answer = self.availability()
        if not answer:
            facts = ", ".join(f"{key} = {value}" for key, value in answer.attributes.items())
            raise NotTestableError(f"{answer.reason} ({facts or 'no attributes'})")

    def managed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a managed copy of a tensor, made by the provider."""
        return self.provider.to_managed(tensor, device=self.device, read_mostly=False, prefetch=False)

    def registry(self, provider: Any = None) -> Registry:
        """Return a registry of the reference backend, the provider or one that stands for it, and the installed placer.

        Raises:
            NotTestableError: No placer is installed.
        """
        placers = [*default_registry().items("q4_placers").values()]
        if not placers:
            raise NotTestableError(contract.MemoryPlacer.absence)
        plugin = plugin_of(reference_backend())
        plugin.q4_placers = hookimpl(lambda: placers)
        plugin.q4_memory_providers = hookimpl(lambda: [self.provider if provider is None else provider])
        return Registry([(f"plugin of {self.name}", plugin)])
