"""``apply_policy`` and the like: one tensor placed by a ``Placer`` of its own."""

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
    """Place a weight, which is written once and then read, as the policy says.

    Args:
        tensor: Any shape and dtype. What is promoted comes back detached, with the same ``requires_grad``.
        policy: As ``Placer``.
        device: As ``Placer``.
        providers: As ``Placer``.
        environment: As ``Placer``.
        layer: Whose weight it is, for messages.

    Returns:
        The tensor to use (the very same one unless promoted), and the decision.

    Raises:
        UnifiedMemoryError: Required, and no provider can; carries the device attributes.
        ConfigError: As ``Placer``.
        InputError: ``tensor`` is no strided tensor.
    """
    return Placer(policy, device=device, providers=providers, environment=environment).weight(tensor, layer)


def apply_source_policy(
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Bring a tensor of a weight to the device that will prepare it, with as few copies as the policy allows.

    Where the device reads it in place (a mapped checkpoint, say), nothing is copied; else it is written once, into
    managed memory, so that a backend that keeps it as it is has it there already. Whatever stands against that, it
    arrives: what a backend makes of it is what ``apply_policy`` judges.

    Args:
        tensor: Any shape and dtype; it is neither changed nor, unless mapped, kept.
        policy: As ``Placer``.
        device: As ``Placer``.
        providers: As ``Placer``.
        environment: As ``Placer``.

    Returns:
        A tensor on ``device``, and the decision.

    Raises:
        ConfigError: As ``Placer``, or torch has no such device here.
        InputError: ``tensor`` is no strided tensor.
    """
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
    """Place a tensor that will be written again and again, apart from every other holder of it, as the policy says.

    Args:
        tensor: Any shape and dtype; neither changed nor, with ``copy``, shared.
        policy: As ``Placer``.
        device: As ``Placer``.
        providers: As ``Placer``.
        copy: False for the sole owner of ``tensor``: where nothing is promoted the result shares its memory. Else it
            is cloned there, and only there: one copy is made, whatever is done.
        environment: As ``Placer``.

    Returns:
        The detached tensor to use, fit for ``MutableTensor(…, copy=False)``, whose versions stay in that memory; and
        the decision.

    Raises:
        UnifiedMemoryError: Required, and no provider can; carries the device attributes. Nothing was copied.
        ConfigError: As ``Placer``.
        InputError: ``tensor`` is no strided tensor.
    """
    return Placer(policy, device=device, providers=providers, environment=environment).mutable(tensor, copy=copy)


def apply_input_policy(
    x: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place an activation as the policy says.

    Under ``PREFER_UNIFIED`` nothing is ever allocated or copied: the very same tensor comes back, prefetched if it is
    managed already. Under ``REQUIRE_UNIFIED`` an activation in ordinary memory is promoted to a temporary, through
    which gradients flow back to ``x``: drop it after the call, or give it back at once with ``release_input``.

    Args:
        x: Any shape and dtype.
        policy: As ``Placer``.
        device: As ``Placer``.
        providers: As ``Placer``.
        environment: As ``Placer``.

    Returns:
        The tensor to use, and the decision.

    Raises:
        UnifiedMemoryError: Required, and no provider can; carries the device attributes.
        ConfigError: As ``Placer``.
        InputError: ``x`` is no strided tensor.
    """
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
