"""``Decision``: what the providers answered about one tensor, and the record or error made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core import Q4Error, UnifiedMemoryError
from q4core.memory import MemoryDecision, availability, placement_by
from q4core.plugin_api import PLUGIN_FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from q4core.memory import MemoryAction, MemoryPlacer, MemoryProvider

__all__ = ["Decision", "summary_of"]


def summary_of(error: BaseException) -> str:
    """Return an error as decisions quote it: without its hint and its attributes, which are recorded separately."""
    return f"{type(error).__name__}: {error.summary if isinstance(error, Q4Error) else error}"


class Decision:
    """A decision about one tensor while it is made: the providers' answers, and the results of further calls.

    Args:
        what: The tensor, for messages.
        placer: The policy, and the device that computes.
        providers: The providers to ask, in this order; at least one.
    """

    def __init__(self, what: str, placer: MemoryPlacer, providers: list[MemoryProvider]) -> None:
        self._what, self._placer = what, placer
        self.usable: list[MemoryProvider] = []
        self._reasons: list[str] = []
        self._attributes: dict[str, Any] = {}
        self._hints: list[str] = []
        self._is_prefixed = len(providers) > 1
        for provider in providers:
            answer = availability(provider, placer.device)
            self._note_facts(provider, answer.attributes)
            if answer.is_available:
                self.usable.append(provider)
            else:
                self._reasons.append(f"{provider.name}: {answer.reason}")
        if not self.usable:
            self._hints.append("Take a device whose attributes allow it (`q4 doctor` lists each).")

    def _note_facts(self, provider: MemoryProvider, facts: Mapping[str, Any]) -> None:
        prefix = f"{provider.name}." if self._is_prefixed else ""
        self._attributes |= {f"{prefix}{key}": value for key, value in facts.items()}

    def owner_of(self, tensor: torch.Tensor) -> MemoryProvider | None:
        """Return the usable provider in whose memory the tensor lies already, mapped memory included."""
        for provider in self.usable:
            try:
                if provider.is_managed(tensor) or placement_by(provider, tensor):
                    return provider
            except PLUGIN_FAULTS as error:
                self._reasons.append(f"{provider.name}: is_managed raised {summary_of(error)}")
        return None

    def ask(
        self, method: str, attempt: Callable[[MemoryProvider], torch.Tensor | None]
    ) -> tuple[MemoryProvider, torch.Tensor] | None:
        """Return the first usable provider whose attempt gives a tensor, with it; errors on the way are noted."""
        for provider in self.usable:
            try:
                tensor = attempt(provider)
            except PLUGIN_FAULTS as error:
                self._reasons.append(f"{provider.name}: {method}: {summary_of(error)}")
                if isinstance(error, UnifiedMemoryError):
                    self._note_facts(provider, error.attributes)
                    self._hints += [error.hint] if error.hint and error.hint not in self._hints else []
            else:
                if tensor is not None:
                    return provider, tensor
        return None

    def made(
        self,
        action: MemoryAction,
        reason: str,
        provider: MemoryProvider | None = None,
        tensor: torch.Tensor | None = None,
    ) -> MemoryDecision:
        """Return the decision with the facts that decided, and the placement of ``tensor``."""
        placement = None
        if provider is not None and tensor is not None:
            try:
                placement = placement_by(provider, tensor)
            except PLUGIN_FAULTS as error:
                reason = f"{reason}; placement_of raised {summary_of(error)}"
        if placement is not None:
            reason = f"{reason}: {placement}"
        name = None if provider is None else provider.name
        size = tensor.nbytes if tensor is not None and action == "promoted" else 0
        return MemoryDecision(self._placer.policy, action, reason, name, self._attributes, size, placement)

    def promoted(self, provider: MemoryProvider, managed: torch.Tensor) -> MemoryDecision:
        """Return the decision that a provider copied a tensor."""
        return self.made("promoted", f"copied into memory of {provider.name}", provider, managed)

    def unplaced(self, *, is_rejected: bool = True) -> MemoryDecision:
        """Return the decision to leave the tensor, with every reason against managed memory.

        Args:
            is_rejected: Whether REQUIRE_UNIFIED makes an error of it.

        Raises:
            UnifiedMemoryError: Managed memory is required.
        """
        what, hint = self._what if is_rejected else None, " ".join(self._hints)
        return self._placer.unplaced(what, "; ".join(self._reasons), attributes=self._attributes, hint=hint)
