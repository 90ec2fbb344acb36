"""Functions that place one tensor each; a ``Placer`` places many."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from q4_um_managed.placer import Placer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from typing_extensions import Required, Unpack

    from q4core import UnifiedMemoryPolicy
    from q4core.memory import MemoryDecision, MemoryProvider

__all__ = ["apply_input_policy", "apply_mutable_policy", "apply_policy", "apply_source_policy"]


class PlacerOptions(TypedDict, total=False):
    """The options of a ``Placer``."""

    device: Required[torch.device | str]
    providers: Iterable[MemoryProvider] | None
    environment: Mapping[str, str] | None


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
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    copy: bool = True,
    name: str | None = None,
    **options: Unpack[PlacerOptions],
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a tensor that will be written again and again; see ``Placer.mutable``."""
    return Placer(policy, **options).mutable(tensor, copy=copy, name=name)


def apply_input_policy(
    x: torch.Tensor, policy: UnifiedMemoryPolicy | str, **options: Unpack[PlacerOptions]
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place an activation; see ``Placer.input``."""
    return Placer(policy, **options).input(x)
