"""What each policy makes of a weight, a mutable tensor or an activation."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from q4core.errors import PLUGIN_FAULTS, ConfigError
from q4core.memory.answers import is_on, managed_by, mapped_by, told
from q4core.memory.homes import note_provider, shares_memory
from q4core.memory.search import Search
from q4core.policy import UnifiedMemoryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from q4core.memory.contract import MemoryDecision, MemoryProvider

__all__ = [
    "apply_input_policy",
    "apply_mutable_policy",
    "apply_policy",
    "apply_source_policy",
    "detached_copy",
    "managed_empty",
    "release_input",
]


def apply_policy(  # noqa: PLR0913  # one argument per fact that decides
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] = (),
    environment: Mapping[str, str] | None = None,
    layer: str | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a weight, which is written once and then read, as the policy says.

    Args:
        tensor: Any shape and dtype. What is promoted comes back detached, with the same ``requires_grad``.
        policy: What is asked for.
        device: Who will compute with it.
        providers: Asked in the order of their names; the first that can, does.
        environment: Taken instead of ``os.environ``.
        layer: Whose weight it is, for messages.

    Returns:
        The tensor to use (the very same one unless promoted), and the decision.

    Raises:
        UnifiedMemoryError: Required, and no provider can; carries the device attributes.
        ConfigError: ``policy``, ``device`` or ``Q4_DISABLE_UM`` is not legal.
        InputError: ``tensor`` is no strided tensor.
    """
    what = "weight" if layer is None else f"weight of layer {layer!r}"
    search = Search(what, tensor, policy, device, providers, environment)
    return _promoted(search, tensor, read_mostly=True, prefetch=True)


def apply_source_policy(
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Bring a tensor of a weight to the device that will prepare it, with as few copies as the policy allows.

    Where the device reads it in place (a mapped checkpoint, say), nothing is copied; else it is written once, into
    managed memory, so that a backend that keeps it as it is has it there already. Whatever stands against that, it
    arrives: what a backend makes of it is what ``apply_policy`` judges.

    Args:
        tensor: Any shape and dtype; it is neither changed nor, unless mapped, kept.
        policy: What is asked for.
        device: Who will compute with it.
        providers: Asked in the order of their names; the first that can, does.
        environment: Taken instead of ``os.environ``.

    Returns:
        A tensor on ``device``, and the decision.

    Raises:
        ConfigError: ``policy``, ``device`` or ``Q4_DISABLE_UM`` is not legal, or torch has no such device here.
        InputError: ``tensor`` is no strided tensor.
    """
    search = Search("weight", tensor, policy, device, providers, environment)
    if is_on(tensor, search.device):
        return tensor, search.decide("left", "on its device already")
    if search.is_idle:
        return _brought(tensor, search.device), search.idle_decision()
    for provider in search.usable:
        try:
            mapped = mapped_by(provider, tensor.detach(), search.device)
            if mapped is not None:
                return mapped, search.decide("mapped", "read where it lies", provider, tensor=mapped)
        except PLUGIN_FAULTS as error:
            search.note_refusal(provider, "map", error)
    for provider in search.usable:
        try:
            managed = managed_by(provider, tensor.detach(), device=search.device, read_mostly=True, prefetch=True)
        except PLUGIN_FAULTS as error:
            search.note_refusal(provider, "to_managed", error)
            continue
        reason = f"copied into memory of {provider.name}"
        return managed, search.decide("promoted", reason, provider, tensor.nbytes, tensor=managed)
    return _brought(tensor, search.device), search.decide("fallback", search.complaint())


def _brought(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        return tensor.to(device)
    except (AssertionError, RuntimeError) as error:  # the first where torch was built without it
        if _is_there(device):
            raise
        rule, hint = "a device that torch has here", f"{type(error).__name__}: {error}"
        raise ConfigError("placing a weight", name="device", rule=rule, value=str(device), hint=hint) from error


def _is_there(device: torch.device) -> bool:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError):
        return False
    return True


def apply_mutable_policy(  # noqa: PLR0913  # one argument per fact that decides
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] = (),
    copy: bool = True,
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a tensor that will be written again and again, apart from every other holder of it, as the policy says.

    Args:
        tensor: Any shape and dtype; neither changed nor, with ``copy``, shared.
        policy: What is asked for.
        device: Who will compute with it.
        providers: Asked in the order of their names; the first that can, does.
        copy: False for the sole owner of ``tensor``: where nothing is promoted the result shares its memory. Else it
            is cloned there, and only there: one copy is made, whatever is done.
        environment: Taken instead of ``os.environ``.

    Returns:
        The detached tensor to use, fit for ``MutableTensor(…, copy=False)``, whose versions stay in that memory; and
        the decision.

    Raises:
        UnifiedMemoryError: Required, and no provider can; carries the device attributes. Nothing was copied.
        ConfigError: ``policy``, ``device`` or ``Q4_DISABLE_UM`` is not legal.
        InputError: ``tensor`` is no strided tensor.
    """
    search = Search("mutable tensor", tensor, policy, device, providers, environment)
    with torch.inference_mode(mode=False):  # what is made there does not count its changes
        placed, decision = _promoted(search, tensor.detach(), read_mostly=False, prefetch=False, is_apart=copy)
    return (detached_copy(tensor) if copy and decision.action != "promoted" else placed), decision


def apply_input_policy(
    x: torch.Tensor,
    policy: UnifiedMemoryPolicy | str,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place an activation as the policy says.

    Under ``PREFER_UNIFIED`` nothing is ever allocated or copied: the very same tensor comes back, prefetched if it is
    managed already. Under ``REQUIRE_UNIFIED`` an activation in ordinary memory is promoted to a temporary, through
    which gradients flow back to ``x``: drop it after the call, or give it back at once with ``release_input``.

    Args:
        x: Any shape and dtype.
        policy: What is asked for.
        device: Who will compute with it.
        providers: Asked in the order of their names; the first that can, does.
        environment: Taken instead of ``os.environ``.

    Returns:
        The tensor to use, and the decision.

    Raises:
        UnifiedMemoryError: Required, and no provider can; carries the device attributes.
        ConfigError: ``policy``, ``device`` or ``Q4_DISABLE_UM`` is not legal.
        InputError: ``x`` is no strided tensor.
    """
    search = Search("activation", x, policy, device, providers, environment)
    if search.is_idle:
        return x, search.idle_decision()
    holder = search.holder_of(x)
    if holder is not None and (is_on(x, search.device) or search.policy is UnifiedMemoryPolicy.PREFER_UNIFIED):
        try:
            holder.prefetch(x, search.device)
        except PLUGIN_FAULTS as error:
            return x, search.decide("left", f"already managed; prefetch raised {told(error)}", holder, tensor=x)
        return x, search.decide("prefetched", "already managed; its pages move to the device", holder, tensor=x)
    if search.policy is UnifiedMemoryPolicy.PREFER_UNIFIED:
        if search.usable:
            return x, search.decide("left", "in ordinary memory; activations are never copied under PREFER_UNIFIED")
        return x, search.decide("fallback", search.complaint())
    return _promoted(search, x, read_mostly=False, prefetch=True)


def release_input(x: torch.Tensor, decision: MemoryDecision, *, providers: Iterable[MemoryProvider]) -> None:
    """Give back what ``apply_input_policy`` promoted; does nothing after any other decision.

    Args:
        x: What ``apply_input_policy`` returned. Nothing may use its memory afterwards, autograd's saved tensors
            included; where that is not sure, drop the last reference instead.
        decision: What ``apply_input_policy`` returned with it.
        providers: The same as there.
    """
    if decision.action != "promoted":
        return
    for provider in providers:
        if provider.name == decision.provider:
            provider.free(x)


def detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy outside any graph, which counts its own changes also where inference mode is on."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return detached_copy(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.clone() if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def managed_empty(
    policy: UnifiedMemoryPolicy, *, device: torch.device, providers: Iterable[MemoryProvider]
) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None:
    """Return ``empty(shape, dtype)`` in managed memory for whoever prepares weights under a policy.

    Args:
        policy: What is asked for.
        device: Who will compute.
        providers: Asked in the order of their names.

    Returns:
        None where the policy wants no managed memory, or nobody has any. A tensor that no provider can allocate comes
        from ordinary memory; ``apply_policy`` then decides about it like about any other.
    """
    search = Search("weight", torch.empty(0), policy, device, providers, None)
    if not search.usable:
        return None

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        for provider in search.usable:
            try:
                managed: object = provider.empty(shape, dtype, device)
                if isinstance(managed, torch.Tensor) and managed.shape == shape and managed.dtype == dtype:
                    note_provider(managed, provider)
                    return managed
            except PLUGIN_FAULTS:  # told once apply_policy asks the provider to promote what lies elsewhere
                continue
        return torch.empty(shape, dtype=dtype, device=device)

    return empty


def _promoted(
    search: Search, tensor: torch.Tensor, *, read_mostly: bool, prefetch: bool, is_apart: bool = False
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a tensor as the policy says; ``is_apart`` if the result may share no memory with it where promoted."""
    if search.is_idle:
        return tensor, search.idle_decision()
    holder = search.holder_of(tensor)
    if holder is not None and not is_apart and is_on(tensor, search.device):
        note_provider(tensor, holder)
        return tensor, search.decide("left", "already managed", holder, tensor=tensor)
    for provider in search.usable:
        promote = functools.partial(
            managed_by, provider, device=search.device, read_mostly=read_mostly, prefetch=prefetch
        )
        try:
            if search.is_activation:
                managed: torch.Tensor = _Promotion.apply(tensor, promote)  # type: ignore[no-untyped-call]  # torch's
            else:
                managed = promote(tensor.detach())
                if is_apart and shares_memory(managed, tensor):  # it maps memory instead of copying
                    managed = promote(detached_copy(tensor))
        except PLUGIN_FAULTS as error:
            search.note_refusal(provider, "to_managed", error)
            continue
        if not search.is_activation:
            managed.requires_grad_(tensor.requires_grad)
        reason = f"copied into memory of {provider.name}"
        return managed, search.decide("promoted", reason, provider, tensor.nbytes, tensor=managed)
    if search.policy is UnifiedMemoryPolicy.PREFER_UNIFIED:
        return tensor, search.decide("fallback", search.complaint())
    raise search.refusal()


class _Promotion(torch.autograd.Function):
    """The identity, whose result lies elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, promote: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.home = tensor.device
        return promote(tensor.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.home), None
