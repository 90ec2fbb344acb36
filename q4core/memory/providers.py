"""Providers: whose memory a tensor lies in, and checks of what a provider returns before anybody relies on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4core.errors import PLUGIN_FAULTS, LifecycleError, PluginError, Q4Error, UnifiedMemoryError
from q4core.memory.contract import Availability, Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4core.memory.contract import MemoryProvider

_NOTE = "_q4_memory_provider"


def note_provider(tensor: torch.Tensor, provider: MemoryProvider) -> None:
    """Take note that a tensor's memory is a provider's, which then lives as long as that memory.

    Whatever a policy places is noted by itself; a provider notes what it hands out directly. Views, detached aliases
    and whatever else shares the tensor's storage are noted with it.
    """
    # On the storage, which torch keeps as one Python object as long as the memory lives: so the note ends with it.
    setattr(tensor.untyped_storage(), _NOTE, provider)


def provider_of(tensor: torch.Tensor) -> MemoryProvider | None:
    """Return whose memory a tensor lies in, by what was noted; None for ordinary memory. Nobody is asked."""
    provider: MemoryProvider | None = getattr(tensor.untyped_storage(), _NOTE, None)
    return provider


def keeper_of(tensor: torch.Tensor) -> Callable[[torch.Tensor, int], object] | None:
    """Return the provider's ``record_stream(tensor, stream)``, which torch's allocator has for its own memory."""
    keep: object = getattr(provider_of(tensor), "record_stream", None)
    return keep if callable(keep) else None


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors lie in the same storage, or in storages at one address."""
    first, second = one.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()
    return first == second != 0


def told(error: BaseException) -> str:
    """Return an error as decisions quote it: without its advice and its list of facts, which go elsewhere."""
    return f"{type(error).__name__}: {error.summary if isinstance(error, Q4Error) else error}"


def availability(provider: MemoryProvider, device: torch.device) -> Availability:
    """Return a provider's answer for a device; one that raises, or answers with something else, is a refusal."""
    try:
        answer: Any = provider.is_available(device)
    except PLUGIN_FAULTS as error:
        reason = f"is_available raised {told(error)}"
    else:
        if isinstance(answer, Availability):
            return answer
        reason = f"is_available must return Availability, not {type(answer).__name__}"
    return Availability(is_available=False, reason=reason)


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device; one without a number is any of its type."""
    index: int | None = device.index  # torch says that it is never None
    return tensor.device == device or (index is None and tensor.device.type == device.type)


def placement_by(provider: MemoryProvider, tensor: torch.Tensor) -> Placement | None:
    """Return what a provider with the optional ``placement_of`` says."""
    ask: Any = getattr(provider, "placement_of", None)
    answer: object = ask(tensor) if callable(ask) else None
    return answer if isinstance(answer, Placement) else None


def holds(provider: MemoryProvider, tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in a provider's memory, mapped memory included."""
    return provider.is_managed(tensor) or placement_by(provider, tensor) is not None


def was_taken_back(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory that its provider, by what was noted, knows no more."""
    provider = provider_of(tensor)
    try:
        return provider is not None and not holds(provider, tensor)
    except PLUGIN_FAULTS:  # told by whoever asks it for more
        return False


def managed_by(
    provider: MemoryProvider, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
) -> torch.Tensor:
    """Return the provider's copy, after a look at whether it is what was asked for."""
    managed = provider.to_managed(tensor, device=device, read_mostly=read_mostly, prefetch=prefetch)
    if not isinstance(managed, torch.Tensor):
        raise PluginError("to_managed", name="result", rule="a tensor", value=type(managed).__name__)
    if (managed.shape, managed.dtype) != (tensor.shape, tensor.dtype):
        wanted, got = (f"{item.dtype} {list(item.shape)}" for item in (tensor, managed))
        raise PluginError("to_managed", name="result", rule=wanted, value=got)
    if not provider.is_managed(managed):
        raise PluginError("to_managed", name="result", rule="in managed memory", value="ordinary memory")
    note_provider(managed, provider)
    return managed


def mapped_by(provider: MemoryProvider, tensor: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Return the tensor as the device reads it in place, after a look at whether it is; None where nobody can."""
    offer: Any = getattr(provider, "map", None)
    mapped: object = offer(tensor, device=device) if callable(offer) else None
    if mapped is None:
        return None
    if not isinstance(mapped, torch.Tensor):
        raise PluginError("map", name="result", rule="a tensor or None", value=type(mapped).__name__)
    facts = [(item.dtype, item.shape, item.data_ptr()) for item in (mapped, tensor)]
    if facts[0] != facts[1] or not is_on(mapped, device):
        value = f"{mapped.dtype} {list(mapped.shape)} on {mapped.device}"
        raise PluginError("map", name="result", rule=f"the same tensor, on {device}", value=value)
    note_provider(mapped, provider)
    return mapped


def copy_beside(provider: MemoryProvider, tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a contiguous copy in the provider's memory on the same device, outside any graph.

    Args:
        provider: Who allocates.
        tensor: Any strided tensor.
        what: Whose copy, for messages.

    Raises:
        UnifiedMemoryError: The provider can't; with its numbers.
        LifecycleError: It can't at this time.
    """
    try:
        with torch.inference_mode(mode=False):  # what is made there does not count its changes
            copy = managed_by(provider, tensor.detach(), device=tensor.device, read_mostly=False, prefetch=False)
        is_same = shares_memory(copy, tensor)
        if is_same or not is_on(copy, tensor.device):
            value = f"{'the same memory' if is_same else 'memory'} on {copy.device}"
            raise PluginError("to_managed", name="result", rule=f"a copy on {tensor.device}", value=value)
    except LifecycleError:
        raise
    except PLUGIN_FAULTS as error:
        is_broken = isinstance(error, PluginError)  # more room would not mend it
        hint = f"Report it to the maker of {provider.name}." if is_broken else "Free some of that memory, or take less."
        raise UnifiedMemoryError(
            what,
            name="copy",
            rule=f"in memory of {provider.name}, where the tensor lies",
            value=told(error),
            hint=(error.hint if isinstance(error, Q4Error) else None) or hint,
            attributes=getattr(error, "attributes", None),
        ) from error
    return copy
