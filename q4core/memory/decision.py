"""The decision about one tensor: what the providers answered, and the record or error made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4core.errors import PLUGIN_FAULTS, UnifiedMemoryError
from q4core.memory.contract import DISABLE_VARIABLE, MemoryDecision
from q4core.memory.providers import availability, holds, placement_by, told
from q4core.policy import UnifiedMemoryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from q4core.memory.contract import MemoryAction, MemoryProvider
    from q4core.memory.placement import Placer

_TURNED_OFF = f"{DISABLE_VARIABLE}=1 turns promotion off"
_NOBODY = (
    "there is no provider of unified memory (q4-um-managed asks a CUDA device for managedMemory, "
    "concurrentManagedAccess and the others)"
)


class Decision:
    """The decision about one tensor in the making: the providers' answers, and what came of asking them for more."""

    def __init__(self, what: str, placer: Placer) -> None:
        self.what, self.policy, self.device = what, placer.policy, placer.device
        self.usable: list[MemoryProvider] = []
        self._reasons: list[str] = []
        self._attributes: dict[str, Any] = {}
        self._hints: list[str] = []
        providers = placer.providers()
        self._is_prefixed = len(providers) > 1
        for provider in providers:
            answer = availability(provider, self.device)
            self._note_facts(provider, answer.attributes)
            if answer.is_available:
                self.usable.append(provider)
            else:
                self._reasons.append(f"{provider.name}: {answer.reason}")
        if placer.is_turned_off:
            self._reasons, self._attributes = [_TURNED_OFF], {DISABLE_VARIABLE: "1"}
            self._hints.append(f"Unset {DISABLE_VARIABLE}.")
        elif not providers:
            self._reasons.append(_NOBODY)
            self._hints.append("Install a plugin that provides it.")
        elif not self.usable:
            self._hints.append("Take a device whose attributes allow it (`q4 doctor` tells each).")

    def _note_facts(self, provider: MemoryProvider, facts: Mapping[str, Any]) -> None:
        prefix = f"{provider.name}." if self._is_prefixed else ""
        self._attributes |= {f"{prefix}{key}": value for key, value in facts.items()}

    def owner_of(self, tensor: torch.Tensor) -> MemoryProvider | None:
        """Return the usable provider in whose memory the tensor lies already, mapped memory included."""
        for provider in self.usable:
            try:
                if holds(provider, tensor):
                    return provider
            except PLUGIN_FAULTS as error:
                self._reasons.append(f"{provider.name}: is_managed raised {told(error)}")
        return None

    def ask(
        self, method: str, attempt: Callable[[MemoryProvider], torch.Tensor | None]
    ) -> tuple[MemoryProvider, torch.Tensor] | None:
        """Return the first usable provider whose attempt gives a tensor, with it; errors on the way are noted."""
        for provider in self.usable:
            try:
                tensor = attempt(provider)
            except PLUGIN_FAULTS as error:
                self._reasons.append(f"{provider.name}: {method}: {told(error)}")
                if isinstance(error, UnifiedMemoryError):
                    self._note_facts(provider, error.attributes)
                    self._hints += [error.hint] if error.hint and error.hint not in self._hints else []
            else:
                if tensor is not None:
                    return provider, tensor
        return None

    def done(
        self,
        action: MemoryAction,
        reason: str,
        provider: MemoryProvider | None = None,
        tensor: torch.Tensor | None = None,
    ) -> MemoryDecision:
        """Return the decision with the facts that decided, and of ``tensor`` where it lies now."""
        placement = None
        if provider is not None and tensor is not None:
            try:
                placement = placement_by(provider, tensor)
            except PLUGIN_FAULTS as error:
                reason = f"{reason}; placement_of raised {told(error)}"
        if placement is not None:
            reason = f"{reason}: {placement}"
        attributes = dict(self._attributes)
        if action in {"fallback", "refused"}:
            attributes = {**_device_facts(self.device), "provider": None, **attributes}
        name = None if provider is None else provider.name
        size = tensor.nbytes if tensor is not None and action == "promoted" else 0
        return MemoryDecision(self.policy, action, reason, name, attributes, size, placement)

    def promoted(self, provider: MemoryProvider, managed: torch.Tensor) -> MemoryDecision:
        """Return the decision that a provider copied a tensor."""
        return self.done("promoted", f"copied into memory of {provider.name}", provider, managed)

    def fallback(self) -> MemoryDecision:
        """Return the decision to leave the tensor, with everything that stood against managed memory."""
        return self.done("fallback", "; ".join(self._reasons))

    def refusal(self) -> UnifiedMemoryError:
        """Return the error for managed memory that is required and can't be had."""
        decision = self.done("refused", "; ".join(self._reasons))
        return UnifiedMemoryError(
            f"{self.what} under REQUIRE_UNIFIED",
            name="memory",
            rule=f"managed memory for device {self.device}",
            value=decision.reason,
            hint=" ".join((*self._hints, "Or ask for PREFER_UNIFIED.")),
            attributes=decision.attributes,
            decision=decision,
        )


def left_alone(policy: UnifiedMemoryPolicy) -> MemoryDecision:
    """Return the decision where the policy, or the environment under PREFER_UNIFIED, wants nothing to be done."""
    if policy is UnifiedMemoryPolicy.DISABLED:
        return MemoryDecision(policy=policy, action="left", reason="the policy is DISABLED")
    return MemoryDecision(policy=policy, action="left", reason=_TURNED_OFF, attributes={DISABLE_VARIABLE: "1"})


def _device_facts(device: torch.device) -> dict[str, Any]:
    """Return what torch itself can say; the managed-memory attributes are a provider's to ask for."""
    if not torch.cuda.is_available():
        return {"cuda_available": False}
    count = torch.cuda.device_count()
    index = device.index if device.type == "cuda" and device.index is not None else torch.cuda.current_device()
    facts: dict[str, Any] = {"cuda_available": True, "cuda_device_count": count, "cuda_device": index}
    if index < count:
        properties: Any = torch.cuda.get_device_properties(index)
        facts |= {
            "capability": f"{properties.major}.{properties.minor}",
            "is_integrated": bool(getattr(properties, "is_integrated", False)),
            "total_memory_bytes": properties.total_memory,
        }
    return facts
