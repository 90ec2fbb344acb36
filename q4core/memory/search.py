"""One decision about one tensor in the making: what was asked, and what the providers answered."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from q4core.errors import PLUGIN_FAULTS, ConfigError, InputError, UnifiedMemoryError
from q4core.memory.answers import availability, placement_by, told
from q4core.memory.contract import (
    DISABLE_VARIABLE,
    MemoryAction,
    MemoryDecision,
    MemoryProvider,
)
from q4core.policy import UnifiedMemoryPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Search", "is_turned_off"]


class Search:
    """One decision in the making: the question, and what the providers answered."""

    def __init__(  # noqa: PLR0913  # one argument per fact that decides
        self,
        what: str,
        tensor: torch.Tensor,
        policy: UnifiedMemoryPolicy | str,
        device: torch.device | str,
        providers: Iterable[MemoryProvider],
        environment: Mapping[str, str] | None,
    ) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InputError(f"placing a {what}", name="tensor", rule="a strided tensor", value=got)
        self.what, self.policy, self.device = what, _to_policy(what, policy), _to_device(device)
        self.is_activation = what == "activation"
        self.is_turned_off = is_turned_off(os.environ if environment is None else environment)
        self.usable: list[MemoryProvider] = []
        self.reasons: list[str] = []
        self.attributes: dict[str, Any] = {}
        self._hints: list[str] = []
        self._asked = 0
        if self.is_idle:
            return
        if self.is_turned_off:
            self.reasons.append(f"{DISABLE_VARIABLE}=1 turns promotion off")
            self.attributes[DISABLE_VARIABLE] = "1"
            return
        self._ask(_by_name(what, providers))

    def _ask(self, providers: Sequence[MemoryProvider]) -> None:
        self._asked = len(providers)
        if not providers:
            asker = "q4-um-managed asks a CUDA device for managedMemory, concurrentManagedAccess and the others"
            self.reasons.append(f"no provider of unified memory was given ({asker})")
        for provider in providers:
            answer = availability(provider, self.device)
            self._note_facts(provider, answer.attributes)
            if answer.is_available:
                self.usable.append(provider)
            else:
                self.reasons.append(f"{provider.name}: {answer.reason}")

    def _note_facts(self, provider: MemoryProvider, facts: Mapping[str, Any]) -> None:
        prefix = f"{provider.name}." if self._asked > 1 else ""
        self.attributes |= {f"{prefix}{key}": value for key, value in facts.items()}

    @property
    def is_idle(self) -> bool:
        """Whether the policy, or the environment under PREFER, wants nothing to be done."""
        return self.policy is UnifiedMemoryPolicy.DISABLED or (
            self.is_turned_off and self.policy is UnifiedMemoryPolicy.PREFER_UNIFIED
        )

    def idle_decision(self) -> MemoryDecision:
        """Return the decision where nothing is to be done."""
        if self.policy is UnifiedMemoryPolicy.DISABLED:
            return MemoryDecision(policy=self.policy, action="left", reason="the policy is DISABLED")
        facts = {DISABLE_VARIABLE: "1"}
        reason = f"{DISABLE_VARIABLE}=1 turns promotion off"
        return MemoryDecision(policy=self.policy, action="left", reason=reason, attributes=facts)

    def holder_of(self, tensor: torch.Tensor) -> MemoryProvider | None:
        """Return the usable provider in whose memory the tensor lies already, mapped memory included."""
        for provider in self.usable:
            try:
                if provider.is_managed(tensor) or placement_by(provider, tensor) is not None:
                    return provider
            except PLUGIN_FAULTS as error:
                self.reasons.append(f"{provider.name}: is_managed raised {told(error)}")
        return None

    def complaint(self) -> str:
        """Return everything that stood against managed memory."""
        return "; ".join(self.reasons)

    def decide(  # the facts of a decision
        self,
        action: MemoryAction,
        reason: str,
        provider: MemoryProvider | None = None,
        size_bytes: int = 0,
        *,
        tensor: torch.Tensor | None = None,
    ) -> MemoryDecision:
        """Return the decision, with the facts that decided; of ``tensor``, where it lies now."""
        placement = None
        if provider is not None and tensor is not None:
            try:
                placement = placement_by(provider, tensor)
            except PLUGIN_FAULTS as error:
                reason = f"{reason}; placement_of raised {told(error)}"
        if placement is not None:
            reason = f"{reason}: {placement}"
        attributes = dict(self.attributes)
        if action in {"fallback", "refused"}:
            attributes = {**_device_facts(self.device), "provider": None, **attributes}
        name = None if provider is None else provider.name
        return MemoryDecision(self.policy, action, reason, name, attributes, size_bytes, placement)

    def note_refusal(self, provider: MemoryProvider, method: str, error: BaseException) -> None:
        """Take note that a provider could not do what it was asked: why, by which facts, and its advice."""
        self.reasons.append(f"{provider.name}: {method}: {told(error)}")
        if isinstance(error, UnifiedMemoryError):
            self._note_facts(provider, error.attributes)
            if error.hint and error.hint not in self._hints:
                self._hints.append(error.hint)

    def _hint(self) -> str:
        """Return what to do about a refusal."""
        if self.is_turned_off:
            return f"Unset {DISABLE_VARIABLE}, or ask for PREFER_UNIFIED."
        if not self._asked:
            given = "where you call apply_*, give default_registry().memory_providers()"
            return f"Install a plugin that provides it ({given}), or ask for PREFER_UNIFIED."
        if not self.usable:
            return "Take a device whose attributes allow it (`q4 doctor` tells each), or ask for PREFER_UNIFIED."
        return " ".join((*self._hints, "Or ask for PREFER_UNIFIED."))

    def refusal(self) -> UnifiedMemoryError:
        """Return the error for managed memory that is required and can't be had."""
        decision = self.decide("refused", self.complaint())
        return UnifiedMemoryError(
            f"{self.what} under REQUIRE_UNIFIED",
            name="memory",
            rule=f"managed memory for device {self.device}",
            value=decision.reason,
            hint=self._hint(),
            attributes=decision.attributes,
            decision=decision,
        )


def _by_name(what: str, providers: Iterable[MemoryProvider]) -> list[MemoryProvider]:
    given = list(providers)
    for provider in given:
        if not isinstance(getattr(provider, "name", None), str):
            hint = "Give default_registry().memory_providers(), or a list of providers."
            value = type(provider).__name__
            raise ConfigError(f"placing a {what}", name="providers", rule="memory providers", value=value, hint=hint)
    return sorted(given, key=lambda provider: provider.name)


def _to_policy(what: str, policy: object) -> UnifiedMemoryPolicy:
    try:
        return UnifiedMemoryPolicy(policy)
    except ValueError:
        legal = ", ".join(repr(member.value) for member in UnifiedMemoryPolicy)
        rule = f"a UnifiedMemoryPolicy ({legal})"
        raise ConfigError(f"placing a {what}", name="policy", rule=rule, value=policy) from None


def _to_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError("unified memory", name="device", rule="a torch device", value=device) from None


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
