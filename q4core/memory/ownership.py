"""Which provider owns a tensor's memory, so that what takes its place can lie there too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4core.memory.contract import MemoryProvider

_NAME = "_q4_memory_provider"


def note_provider(tensor: torch.Tensor, provider: MemoryProvider) -> None:
    """Take note that a tensor's memory is a provider's.

    Whatever a policy of this module places is noted by itself. A provider notes what it hands out directly.

    Args:
        tensor: Any tensor in that memory. Views, detached aliases and whatever else shares its storage are noted too.
        provider: Who allocates more of the kind. It lives as long as the memory.
    """
    # On the storage, which torch keeps as one Python object as long as the memory lives: so the note ends with it.
    setattr(tensor.untyped_storage(), _NAME, provider)


def provider_of(tensor: torch.Tensor) -> MemoryProvider | None:
    """Return whose memory a tensor lies in, by what was noted; None for ordinary memory. Nobody is asked."""
    provider: MemoryProvider | None = getattr(tensor.untyped_storage(), _NAME, None)
    return provider


def keeper_of(tensor: torch.Tensor) -> Callable[[torch.Tensor, int], object] | None:
    """Return the provider's ``record_stream(tensor, stream)``, which torch's allocator has for its own memory."""
    keep: object = getattr(provider_of(tensor), "record_stream", None)
    return keep if callable(keep) else None


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors lie in the same storage, or in storages at one address."""
    first, second = one.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()
    return first == second != 0
