"""``MemoryPlacer``: the unified-memory policies where no plugin has such memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from q4core.errors import ConfigError, InputError, UnifiedMemoryError
from q4core.memory.contract import DISABLE_VARIABLE, MemoryDecision
from q4core.policy.config import UnifiedMemoryPolicy, to_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from q4core.memory.contract import MemoryProvider

_TURNED_OFF = f"{DISABLE_VARIABLE}=1 turns promotion off"


class MemoryPlacer:
    """Places tensors for one device, as a policy says; this class asks no provider and leaves them, or raises.

    ``Registry.placer`` makes one: of the class that a plugin gives by the hook ``q4_placers``, else of this one. That
    of q4-um-managed documents each method. All return the tensor to use and a ``MemoryDecision`` that says what was
    done and why.

    Args:
        policy: What is asked for.
        device: The device that computes.
        providers: Who is asked, by a subclass.
        environment: Defaults to ``os.environ``.

    Raises:
        ConfigError: ``policy``, ``device`` or ``Q4_DISABLE_UM`` is not legal.
    """

    absence = (
        "no plugin places tensors in unified memory (pip install q4-um-managed, which asks a CUDA device for "
        "managedMemory, concurrentManagedAccess and the others)"
    )
    """Why no provider is asked, where the policy asks for one."""
    remedy = "Install q4-um-managed."
    """What to do about it."""

    def __init__(
        self,
        policy: UnifiedMemoryPolicy | str,
        *,
        device: torch.device | str,
        providers: Iterable[MemoryProvider] | None = None,  # noqa: ARG002  # a subclass's
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.policy = to_option(UnifiedMemoryPolicy, policy, "unified memory", "policy")
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ConfigError("unified memory", name="device", rule="a torch device", value=device) from None
        self.is_turned_off = is_turned_off(os.environ if environment is None else environment)

    @property
    def is_idle(self) -> bool:
        """Whether the policy or ``Q4_DISABLE_UM`` keeps all tensors where they are, so that no provider is asked."""
        return self.is_turned_off or self.policy is UnifiedMemoryPolicy.DISABLED

    def weight(self, tensor: torch.Tensor, layer: str | None = None) -> tuple[torch.Tensor, MemoryDecision]:
        """Place a weight, which is written once and then read."""
        what = "weight" if layer is None else f"weight of layer {layer!r}"
        check_strided(what, tensor)
        return tensor, self._left(what)

    def source(self, tensor: torch.Tensor) -> tuple[torch.Tensor, MemoryDecision]:
        """Bring a tensor of a weight to the device that will prepare it; it arrives under every policy."""
        check_strided("weight", tensor)
        moved, decision = self.moved(tensor), self._left(None)
        if moved is tensor and decision.action == "fallback":
            decision = MemoryDecision(self.policy, "left", "on its device already")
        return moved, decision

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device that computes, in ordinary memory.

        Raises:
            ConfigError: torch has no such device here.
        """
        try:
            torch.empty(0, device=self.device)
        except (AssertionError, RuntimeError) as error:  # the first where torch was built without it
            rule, hint = "a device that torch has here", f"{type(error).__name__}: {error}"
            raise ConfigError(
                "placing a weight", name="device", rule=rule, value=str(self.device), hint=hint
            ) from error
        return tensor.to(self.device)

    def mutable(
        self, tensor: torch.Tensor, *, copy: bool = True, name: str | None = None
    ) -> tuple[torch.Tensor, MemoryDecision]:
        """Place a tensor that will be written again and again; a copy of its own, unless ``copy`` is False."""
        what = "mutable tensor" if name is None else f"mutable tensor {name!r}"
        check_strided(what, tensor)
        decision = self._left(what)
        if copy:
            return detached_copy(tensor), decision
        with torch.inference_mode(mode=False):  # a tensor made in inference mode does not count its changes
            return tensor.detach(), decision

    def input(self, x: torch.Tensor) -> tuple[torch.Tensor, MemoryDecision]:
        """Place an activation."""
        check_strided("activation", x)
        return x, self._left("activation")

    def empty(self) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None:
        """Return ``empty(shape, dtype)`` in managed memory for a backend that prepares weights, or None."""
        return None

    @staticmethod
    def copy_into(provider: MemoryProvider, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Return a contiguous copy of a tensor in a provider's memory on the same device, outside any graph."""
        rule = f"in memory of {provider.name}, on {tensor.device}"
        raise UnifiedMemoryError(what, name="copy", rule=rule, value=MemoryPlacer.absence, hint=MemoryPlacer.remedy)

    def unplaced(
        self, what: str | None, reason: str, *, attributes: Mapping[str, Any] | None = None, hint: str = ""
    ) -> MemoryDecision:
        """Return the decision that a tensor falls back to ordinary memory; raise where that is not allowed.

        Args:
            what: The tensor, for the error under REQUIRE_UNIFIED; None for one that falls back under every policy.
            reason: Why managed memory is not used.
            attributes: The facts that decided; what torch says of the device is added.
            hint: What to do about it.

        Raises:
            UnifiedMemoryError: Managed memory is required.
        """
        facts = {**_device_facts(self.device), "provider": None, **(attributes or {})}
        if what is None or self.policy is UnifiedMemoryPolicy.PREFER_UNIFIED:
            return MemoryDecision(self.policy, "fallback", reason, attributes=facts)
        decision = MemoryDecision(self.policy, "refused", reason, attributes=facts)
        raise UnifiedMemoryError(
            f"{what} under REQUIRE_UNIFIED",
            name="memory",
            rule=f"managed memory for device {self.device}",
            value=reason,
            hint=f"{hint} Or ask for PREFER_UNIFIED.".lstrip(),
            attributes=facts,
            decision=decision,
        )

    def _left(self, what: str | None) -> MemoryDecision:
        """Return the decision without any provider: left alone, a fallback, or the error."""
        if self.policy is UnifiedMemoryPolicy.DISABLED:
            return MemoryDecision(self.policy, "left", "the policy is DISABLED")
        if not self.is_turned_off:
            return self.unplaced(what, self.absence, hint=self.remedy)
        facts = {DISABLE_VARIABLE: "1"}
        if self.policy is UnifiedMemoryPolicy.PREFER_UNIFIED:
            return MemoryDecision(self.policy, "left", _TURNED_OFF, attributes=facts)
        return self.unplaced(what, _TURNED_OFF, attributes=facts, hint=f"Unset {DISABLE_VARIABLE}.")


def is_turned_off(environment: Mapping[str, str]) -> bool:
    """Return whether ``Q4_DISABLE_UM`` turns promotion off.

    Raises:
        ConfigError: Its value is not legal.
    """
    value = environment.get(DISABLE_VARIABLE, "")
    if value not in {"", "0", "1"}:  # empty is unset, as for every Q4_ variable
        what, hint = f"environment variable {DISABLE_VARIABLE}", f"Correct or unset {DISABLE_VARIABLE}."
        raise ConfigError(what, name=DISABLE_VARIABLE, rule="'0' or '1'", value=value, hint=hint)
    return value == "1"


def check_strided(what: str, tensor: object) -> None:
    """Reject what is no strided tensor.

    Raises:
        InputError: It is none.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InputError(f"placing a {what}", name="tensor", rule="a strided tensor", value=got)


def detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy outside any graph, which counts its own changes also where inference mode is on."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return detached_copy(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.clone() if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


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
