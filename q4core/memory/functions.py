"""``apply_policy`` and the like: one tensor, placed by a ``Placer`` made of the same arguments, with its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4core.memory.placement import Placer, installed_providers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from q4core.memory.contract import MemoryDecision, MemoryProvider
    from q4core.policy import UnifiedMemoryPolicy

__all__ = ["apply_input_policy", "apply_mutable_policy", "apply_policy", "apply_source_policy", "release_input"]


def apply_policy(  # noqa: PLR0913  # a tensor, and what makes a Placer
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] | None = None,
    environment: Mapping[str, str] | None = None,
    layer: str | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a weight; see ``Placer.weight``."""
    return Placer(policy, device=device, providers=providers, environment=environment).weight(tensor, layer)


def apply_source_policy(
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Bring a tensor of a weight to the device that will prepare it; see ``Placer.source``."""
    return Placer(policy, device=device, providers=providers, environment=environment).source(tensor)


def apply_mutable_policy(  # noqa: PLR0913  # a tensor, and what makes a Placer
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] | None = None,
    copy: bool = True,
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a tensor that will be written again and again; see ``Placer.mutable``."""
    return Placer(policy, device=device, providers=providers, environment=environment).mutable(tensor, copy=copy)


def apply_input_policy(
    x: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place an activation; see ``Placer.input``."""
    return Placer(policy, device=device, providers=providers, environment=environment).input(x)


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
    if decision.action != "promoted":
        return
    for provider in installed_providers() if providers is None else providers:
        if provider.name == decision.provider:
            provider.free(x)
