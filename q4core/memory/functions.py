"""``apply_policy`` and the like: one tensor, placed by a ``Placer`` of the same options, with its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4core.memory.placement import Placer, installed_providers

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from typing_extensions import Unpack

    from q4core.memory.contract import MemoryDecision, MemoryProvider
    from q4core.memory.placement import PlacerOptions
    from q4core.policy import UnifiedMemoryPolicy


def apply_policy(
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    layer: str | None = None,
    **options: Unpack[PlacerOptions],
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a weight; see ``Placer.weight``."""
    return Placer(policy, **options).weight(tensor, layer)


def apply_source_policy(
    tensor: torch.Tensor, policy: UnifiedMemoryPolicy | str, **options: Unpack[PlacerOptions]
) -> tuple[torch.Tensor, MemoryDecision]:
    """Bring a tensor of a weight to the device that will prepare it; see ``Placer.source``."""
    return Placer(policy, **options).source(tensor)


def apply_mutable_policy(
    tensor: torch.Tensor, policy: UnifiedMemoryPolicy | str, *, copy: bool = True, **options: Unpack[PlacerOptions]
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a tensor that will be written again and again; see ``Placer.mutable``."""
    return Placer(policy, **options).mutable(tensor, copy=copy)


def apply_input_policy(
    x: torch.Tensor, policy: UnifiedMemoryPolicy | str, **options: Unpack[PlacerOptions]
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place an activation; see ``Placer.input``."""
    return Placer(policy, **options).input(x)


def release_input(
    x: torch.Tensor, decision: MemoryDecision, *, providers: Iterable[MemoryProvider] | None = None
) -> None:
    """Give back what ``apply_input_policy`` promoted; does nothing after any other decision.

    Args:
        x: What ``apply_input_policy`` returned. Nothing may use its memory afterwards, autograd's saved tensors
            included; where that is not sure, drop the last reference instead.
        decision: What ``apply_input_policy`` returned with it.
        providers: The same as there.
    """
    if decision.action == "promoted":
        for provider in installed_providers() if providers is None else providers:
            if provider.name == decision.provider:
                provider.free(x)
