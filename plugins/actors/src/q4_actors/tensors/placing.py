"""``mutable``: conversion of a tensor to shared state, placed by a unified-memory policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4_actors.tensors.arguments import MutableMode, label_of, to_mode
from q4_actors.tensors.tensor import MutableTensor
from q4core.plugin_api import emit, resolve_device

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["decide_for_processes", "mutable", "record"]


def mutable(  # noqa: PLR0913  # the options of one call
    tensor: torch.Tensor,
    *,
    unified_memory: q4.UnifiedMemoryPolicy | str | None = None,
    device: torch.device | str | None = None,
    mode: MutableMode | str | None = None,
    name: str | None = None,
    providers: Iterable[q4.MemoryProvider] | None = None,
    version: int = 0,
) -> MutableTensor:
    """Return a ``MutableTensor`` with a copy of a tensor, placed as a unified-memory policy says.

    Where a provider promotes it and can show both sides of its memory, an ``IN_PLACE`` tensor is read and written on
    either: ``read(device="cpu")``, ``write(device="cuda")``. The tensor's ``placement`` says what was done, and why.

    Args:
        tensor: The first content: strided, on CPU or CUDA, of any dtype and shape. It is detached and copied once.
        unified_memory: The policy. Defaults to that of ``q4.using``, else of ``Q4_UNIFIED_MEMORY``, else
            ``DISABLED``.
        device: Where to compute. Defaults to that of ``q4.using``, else of ``Q4_DEVICE``, else the tensor's own.
        mode: How an update and its readers are isolated from each other. Defaults to ``IN_PLACE`` where the tensor
            was promoted, so that its address stays the same, and else to ``VERSIONED``.
        name: For messages.
        providers: Providers of managed memory. Defaults to the installed plugins'.
        version: The number of the first content.

    Raises:
        ConfigError: An option is not legal, or the device is not available.
        UnifiedMemoryError: Required, and no provider can; carries the device attributes.
        InputError: ``tensor`` can't be shared.
    """
    label = label_of(name)
    wanted: Any = None if mode is None else to_mode(label, mode)
    if not isinstance(tensor, torch.Tensor):
        raise q4.InputError(label, name="tensor", rule="a tensor", value=type(tensor).__name__)
    config = q4.resolve_config(q4.SessionConfig(device=device, unified_memory=unified_memory))
    target = resolve_device(config, tensor.device)
    asked = None if providers is None else list(providers)
    policy = config.unified_memory or q4.UnifiedMemoryPolicy.DISABLED
    placer = q4.default_registry().placer(policy, device=target, providers=asked)
    placed, decision = placer.mutable(tensor, name=name)
    is_promoted = decision.action == "promoted"
    if not is_promoted and placed.device != target:
        placed = placed.to(target)
    if wanted is None:
        wanted = MutableMode.IN_PLACE if is_promoted else MutableMode.VERSIONED
    sides = None
    if is_promoted and wanted is MutableMode.IN_PLACE and target.type == "cuda":
        some = q4.default_registry().memory_providers() if asked is None else asked
        owner: Any = next(item for item in some if item.name == decision.provider)
        view = getattr(owner, "dual_view", None)
        sides = None if view is None else view(placed)
    made = MutableTensor(placed, mode=wanted, name=name, copy=False, sides=sides, version=version)
    record(made, decision)
    return made


def record(made: MutableTensor, decision: q4.MemoryDecision) -> None:
    """Store a decision on the tensor that it is about, and send it as an event."""
    made.placement = decision
    fields = {**attrs.asdict(decision), "policy": decision.policy.value}
    emit("q4.actor.mutable", tensor=made.name, mode=made.mode.value, device=str(made.device), **fields)


def decide_for_processes(
    name: str, unified_memory: q4.UnifiedMemoryPolicy | str | None, device: torch.device | str | None = None
) -> q4.MemoryDecision:
    """Return the decision of a policy where processes share the tensor.

    Raises:
        ConfigError: The device is not the CPU.
        UnifiedMemoryError: Required.
    """
    label = f"mutable tensor {name!r}"
    if device is not None and torch.device(device).type != "cpu":
        raise q4.ConfigError(
            label, name="device", rule="'cpu' but on threads", value=str(device), hint='Use runtime="threads".'
        )
    policy = q4.resolve_config(q4.SessionConfig(unified_memory=unified_memory)).unified_memory
    if policy is None or policy is q4.UnifiedMemoryPolicy.DISABLED:
        return q4.MemoryDecision(q4.UnifiedMemoryPolicy.DISABLED, "left", "the policy is DISABLED")
    reason = "unified memory belongs to one process, and several share this tensor"
    if policy is q4.UnifiedMemoryPolicy.PREFER_UNIFIED:
        return q4.MemoryDecision(policy, "fallback", reason)
    decision = q4.MemoryDecision(policy, "refused", reason)
    hint = 'Use runtime="threads", or ask for prefer_unified.'
    raise q4.UnifiedMemoryError(f"{label} can't lie there: {reason}", hint=hint, decision=decision)
