"""The decision about one tensor: what the providers answered, and the record or error made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4core.errors import PLUGIN_FAULTS, ConfigError, UnifiedMemoryError
from q4core.memory.contract import DISABLE_VARIABLE, MemoryDecision
from q4core.memory.provider_checks import availability, placement_by, told
from q4core.policy import UnifiedMemoryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from q4core.memory.contract import MemoryAction, MemoryProvider

__all__ = ["Decision", "is_turned_off", "left_alone"]

_TURNED_OFF = f"{DISABLE_VARIABLE}=1 turns promotion off"


class Decision:
    """The decision about one tensor in the making: the providers' answers, and what came of asking them for more.

    Args:
        what: What is placed, for messages.
        policy: What is asked for.
        device: Who will compute.
        providers: Who is asked; None where promotion is turned off, and nobody is.
    """

    def __init__(
        self,
        what: str,
        policy: UnifiedMemoryPolicy,
        device: torch.device,
        providers: Iterable[MemoryProvider] | None,
    ) -> None:
        self.what, self.policy, self.device = what, policy, device
        self.usable: list[MemoryProvider] = []
        self._reasons: list[str] = []
        self._attributes: dict[str, Any] = {}
        self._hints: list[str] = []
        self._is_turned_off = providers is None
        if providers is None:
            self._reasons.append(_TURNED_OFF)
            self._attributes[DISABLE_VARIABLE] = "1"
        asked = _by_name(what, providers or ())
        self._asked = len(asked)
        if not asked and providers is not None:
            asker = "q4-um-managed asks a CUDA device for managedMemory, concurrentManagedAccess and the others"
            self._reasons.append(f"there is no provider of unified memory ({asker})")
        for provider in asked:
            answer = availability(provider, device)
            self._note_facts(provider, answer.attributes)
            if answer.is_available:
                self.usable.append(provider)
            else:
                self._reasons.append(f"{provider.name}: {answer.reason}")

    def _note_facts(self, provider: MemoryProvider, facts: Mapping[str, Any]) -> None:
        prefix = f"{provider.name}." if self._asked > 1 else ""
        self._attributes |= {f"{prefix}{key}": value for key, value in facts.items()}

    def owner_of(self, tensor: torch.Tensor) -> MemoryProvider | None:
        """Return the usable provider in whose memory the tensor lies already, mapped memory included."""
        for provider in self.usable:
            try:
                if provider.is_managed(tensor) or placement_by(provider, tensor) is not None:
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
                self._note_error(provider, method, error)
            else:
                if tensor is not None:
                    return provider, tensor
        return None

    def _note_error(self, provider: MemoryProvider, method: str, error: BaseException) -> None:
        """Take note that a provider could not do what it was asked: why, by which facts, and its advice."""
        self._reasons.append(f"{provider.name}: {method}: {told(error)}")
        if isinstance(error, UnifiedMemoryError):
            self._note_facts(provider, error.attributes)
            if error.hint and error.hint not in self._hints:
                self._hints.append(error.hint)

    def done(
        self,
        action: MemoryAction,
        reason: str,
        provider: MemoryProvider | None = None,
        tensor: torch.Tensor | None = None,
        *,
        size_bytes: int = 0,
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
        return MemoryDecision(self.policy, action, reason, name, attributes, size_bytes, placement)

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
            hint=self._hint(),
            attributes=decision.attributes,
            decision=decision,
        )

    def _hint(self) -> str:
        if self._is_turned_off:
            return f"Unset {DISABLE_VARIABLE}, or ask for PREFER_UNIFIED."
        if not self._asked:
            return "Install a plugin that provides it, or ask for PREFER_UNIFIED."
        if not self.usable:
            return "Take a device whose attributes allow it (`q4 doctor` tells each), or ask for PREFER_UNIFIED."
        return " ".join((*self._hints, "Or ask for PREFER_UNIFIED."))


def left_alone(policy: UnifiedMemoryPolicy) -> MemoryDecision:
    """Return the decision where the policy, or the environment under PREFER_UNIFIED, wants nothing to be done."""
    if policy is UnifiedMemoryPolicy.DISABLED:
        return MemoryDecision(policy=policy, action="left", reason="the policy is DISABLED")
    return MemoryDecision(policy=policy, action="left", reason=_TURNED_OFF, attributes={DISABLE_VARIABLE: "1"})


def _by_name(what: str, providers: Iterable[MemoryProvider]) -> list[MemoryProvider]:
    given = list(providers)
    for provider in given:
        if not isinstance(getattr(provider, "name", None), str):
            hint = "Give a list of providers, or leave it out for those that are installed."
            value = type(provider).__name__
            raise ConfigError(f"placing a {what}", name="providers", rule="memory providers", value=value, hint=hint)
    return sorted(given, key=lambda provider: provider.name)


def is_turned_off(environment: Mapping[str, str]) -> bool:
    """Return whether ``Q4_DISABLE_UM`` turns promotion off.

    Raises:
        ConfigError: Its value is not legal.
    """
    value = environment.get(DISABLE_VARIABLE, "")
    if value not in {"", "0", "1"}:  # empty is unset, as for every Q4_ variable
        raise ConfigError(
            f"environment variable {DISABLE_VARIABLE}",
            name=DISABLE_VARIABLE,
            rule="'0' or '1'",
            value=value,
            hint=f"Correct or unset {DISABLE_VARIABLE}.",
        )
    return value == "1"


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
