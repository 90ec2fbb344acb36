"""Copies and mappings that a provider makes, each validated before anything relies on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_um_managed.decision import summary_of
from q4core import LifecycleError, PluginError, Q4Error, UnifiedMemoryError
from q4core.memory import note_provider
from q4core.plugin_api import PLUGIN_FAULTS

if TYPE_CHECKING:
    from q4core.memory import MemoryProvider

__all__ = ["copied_by", "copy_into", "is_on", "mapped_by", "shares_memory"]


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors lie in the same storage, or in storages at one address."""
    first, second = one.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()
    return first == second != 0


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device; one without a number is any of its type."""
    index: int | None = device.index  # torch says that it is never None
    return tensor.device == device or (index is None and tensor.device.type == device.type)


def copied_by(
    provider: MemoryProvider,
    tensor: torch.Tensor,
    device: torch.device,
    *,
    read_mostly: bool = False,
    prefetch: bool = False,
) -> torch.Tensor:
    """Return the provider's copy of a tensor, noted as its memory.

    Raises:
        PluginError: It is no managed tensor of the same shape and dtype.
    """
    managed: object = provider.to_managed(tensor.detach(), device=device, read_mostly=read_mostly, prefetch=prefetch)
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
    """Return the tensor as the device reads it in place, noted as the provider's; None where it can't be.

    Raises:
        PluginError: The provider's ``map`` gave another tensor.
    """
    offer: Any = getattr(provider, "map", None)
    mapped: object = offer(tensor.detach(), device=device) if callable(offer) else None
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


def copy_into(provider: MemoryProvider, tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a contiguous copy in a provider's memory on the same device, outside any graph.

    Args:
        provider: The provider that allocates.
        tensor: Any strided tensor.
        what: The copy, for messages.

    Raises:
        UnifiedMemoryError: The provider can't; with its numbers.
        LifecycleError: It can't at this time.
    """
    try:
        with torch.inference_mode(mode=False):  # a tensor made in inference mode does not count its changes
            copy = copied_by(provider, tensor, tensor.device)
        is_same = shares_memory(copy, tensor)
        if is_same or not is_on(copy, tensor.device):
            value = f"{'the same memory' if is_same else 'memory'} on {copy.device}"
            raise PluginError("to_managed", name="result", rule=f"a copy on {tensor.device}", value=value)
    except LifecycleError:
        raise
    except PLUGIN_FAULTS as error:
        is_broken = isinstance(error, PluginError)  # more room would not help
        hint = f"Report it to the maker of {provider.name}." if is_broken else "Free some of that memory, or take less."
        raise UnifiedMemoryError(
            what,
            name="copy",
            rule=f"in memory of {provider.name}, where the tensor lies",
            value=summary_of(error),
            hint=(error.hint if isinstance(error, Q4Error) else None) or hint,
            attributes=getattr(error, "attributes", None),
        ) from error
    return copy
