"""The provider in whose memory a tensor lies, by a note on its storage, and what providers answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core.errors import PLUGIN_FAULTS, Q4Error
from q4core.memory.contract import Availability, Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4core.memory.contract import MemoryDecision, MemoryProvider

_NOTE = "_q4_memory_provider"


def note_provider(tensor: torch.Tensor, provider: MemoryProvider) -> None:
    """Take note that a tensor's memory is a provider's, which then lives as long as that memory.

    What a policy places is noted by itself; a provider notes what it hands out directly. Views, detached aliases
    and all else that shares the tensor's storage are noted with it.
    """
    # On the storage, which torch keeps as one Python object as long as the memory lives: so the note ends with it.
    setattr(tensor.untyped_storage(), _NOTE, provider)


def provider_of(tensor: torch.Tensor) -> MemoryProvider | None:
    """Return whose memory a tensor lies in, by what was noted; None for ordinary memory. No provider is asked."""
    provider: MemoryProvider | None = getattr(tensor.untyped_storage(), _NOTE, None)
    return provider


def keeper_of(tensor: torch.Tensor) -> Callable[[torch.Tensor, int], object] | None:
    """Return the provider's ``record_stream(tensor, stream)``, which torch's allocator has for its own memory."""
    keep: object = getattr(provider_of(tensor), "record_stream", None)
    return keep if callable(keep) else None


def availability(provider: MemoryProvider, device: torch.device) -> Availability:
    """Return a provider's answer for a device; one that raises, or answers with something else, is a refusal."""
    try:
        answer: Any = provider.is_available(device)
    except PLUGIN_FAULTS as error:
        summary = error.summary if isinstance(error, Q4Error) else error  # advice and facts go elsewhere
        reason = f"is_available raised {type(error).__name__}: {summary}"
    else:
        if isinstance(answer, Availability):
            return answer
        reason = f"is_available must return Availability, not {type(answer).__name__}"
    return Availability(is_available=False, reason=reason)


def placement_by(provider: MemoryProvider, tensor: torch.Tensor) -> Placement | None:
    """Return what a provider with the optional ``placement_of`` says."""
    ask: Any = getattr(provider, "placement_of", None)
    answer: object = ask(tensor) if callable(ask) else None
    return answer if isinstance(answer, Placement) else None


def was_taken_back(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory that its provider, by what was noted, knows no more."""
    provider = provider_of(tensor)
    try:
        return provider is not None and not (provider.is_managed(tensor) or placement_by(provider, tensor))
    except PLUGIN_FAULTS:  # reported where it is asked for more
        return False


def release_input(x: torch.Tensor, decision: MemoryDecision) -> None:
    """Give back what ``MemoryPlacer.input`` promoted; does nothing after any other decision.

    Args:
        x: What it returned. Nothing may use its memory afterwards, autograd's saved tensors included. If that is not
            sure, drop the last reference instead.
        decision: What it returned with it.
    """
    provider = provider_of(x)
    if decision.action == "promoted" and provider is not None:
        provider.free(x)
