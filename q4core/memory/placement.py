"""Placement of weights, mutable tensors and activations under a unified-memory policy."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from q4core.errors import PLUGIN_FAULTS, ConfigError, InputError
from q4core.memory.contract import DISABLE_VARIABLE
from q4core.memory.decision import Decision, left_alone
from q4core.memory.providers import is_on, managed_by, mapped_by, note_provider, shares_memory, told
from q4core.policy import UnifiedMemoryPolicy, to_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from typing_extensions import Required, Unpack

    from q4core.memory.contract import MemoryDecision, MemoryProvider

_installed: Callable[[], Iterable[MemoryProvider]] = tuple


def take_providers_from(installed: Callable[[], Iterable[MemoryProvider]]) -> None:
    """Ask a function for the providers wherever none are given; whoever loads plugins says so."""
    global _installed  # noqa: PLW0603  # one per process
    _installed = installed


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


class PlacerOptions(TypedDict, total=False):
    """The options of a ``Placer``, for the functions that make one."""

    device: Required[torch.device | str]
    providers: Iterable[MemoryProvider] | None
    environment: Mapping[str, str] | None


class Placer:
    """Places tensors for one device, as a policy says.

    Each method returns the tensor to use and a ``MemoryDecision`` that says what was done and why.

    Args:
        policy: What is asked for.
        device: Who will compute.
        providers: Asked in the order of their names; the first that can, serves. The installed plugins' unless told.
        environment: Taken instead of ``os.environ``.

    Raises:
        ConfigError: ``policy``, ``device``, a provider or ``Q4_DISABLE_UM`` is not legal.
    """

    def __init__(
        self,
        policy: UnifiedMemoryPolicy | str,
        *,
        device: torch.device | str,
        providers: Iterable[MemoryProvider] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.policy = to_option(UnifiedMemoryPolicy, policy, "unified memory", "policy")
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ConfigError("unified memory", name="device", rule="a torch device", value=device) from None
        self._providers = None if providers is None else list(providers)
        for provider in self._providers or ():
            if not isinstance(getattr(provider, "name", None), str):
                hint = "Give a list of providers, or leave it out for those that are installed."
                value = type(provider).__name__
                raise ConfigError("unified memory", name="providers", rule="memory providers", value=value, hint=hint)
        self.is_turned_off = is_turned_off(os.environ if environment is None else environment)

    @property
    def is_idle(self) -> bool:
        """Whether the policy, or the environment under PREFER_UNIFIED, wants nothing to be done."""
        is_required = self.policy is UnifiedMemoryPolicy.REQUIRE_UNIFIED
        return self.policy is UnifiedMemoryPolicy.DISABLED or (self.is_turned_off and not is_required)

    def providers(self) -> Sequence[MemoryProvider]:
        """Return who is asked, in the order of their names; nobody where promotion is turned off."""
        if self.is_turned_off:
            return ()
        given = _installed() if self._providers is None else self._providers
        return sorted(given, key=lambda provider: provider.name)

    def weight(self, tensor: torch.Tensor, layer: str | None = None) -> tuple[torch.Tensor, MemoryDecision]:
        """Place a weight, which is written once and then read.

        Args:
            tensor: Any shape and dtype. What is promoted comes back detached, with the same ``requires_grad``.
            layer: Whose weight it is, for messages.

        Raises:
            UnifiedMemoryError: Required, and no provider can; carries the device attributes.
            InputError: ``tensor`` is no strided tensor.
        """
        what = "weight" if layer is None else f"weight of layer {layer!r}"
        _require_strided(what, tensor)
        if self.is_idle:
            return tensor, left_alone(self.policy)
        return self._promoted(Decision(what, self), tensor, lambda provider: self._copied(provider, tensor))

    def source(self, tensor: torch.Tensor) -> tuple[torch.Tensor, MemoryDecision]:
        """Bring a tensor of a weight to the device that will prepare it, with as few copies as the policy allows.

        Where the device reads it in place (a mapped checkpoint, say), nothing is copied; else it is written once, into
        managed memory, so that a backend that keeps it as it is has it there already. Whatever stands against that, it
        arrives: what a backend makes of it is what ``weight`` judges. The tensor has any shape and dtype; it is neither
        changed nor, unless mapped, kept.

        Raises:
            ConfigError: torch has no such device here.
            InputError: ``tensor`` is no strided tensor.
        """
        _require_strided("weight", tensor)
        if self.is_idle:
            return _moved(tensor, self.device), left_alone(self.policy)
        decision = Decision("weight", self)
        if is_on(tensor, self.device):
            return tensor, decision.done("left", "on its device already")
        found = decision.ask("map", lambda provider: mapped_by(provider, tensor.detach(), self.device))
        if found is not None:
            return found[1], decision.done("mapped", "read where it lies", *found)
        found = decision.ask("to_managed", lambda provider: self._copied(provider, tensor.detach()))
        if found is not None:
            return found[1], decision.promoted(*found)
        return _moved(tensor, self.device), decision.fallback()

    def mutable(
        self, tensor: torch.Tensor, *, copy: bool = True, name: str | None = None
    ) -> tuple[torch.Tensor, MemoryDecision]:
        """Place a tensor that will be written again and again, apart from every other holder of it.

        Args:
            tensor: Any shape and dtype; neither changed nor, with ``copy``, shared.
            copy: False for the sole owner of ``tensor``: where nothing is promoted the result shares its memory. Else
                it is cloned there, and only there: one copy is made, whatever is done.
            name: The tensor's, for messages.

        Returns:
            The detached tensor to use, fit for ``MutableTensor(…, copy=False)``, whose versions stay in that memory;
            and the decision.

        Raises:
            UnifiedMemoryError: Required, and no provider can; carries the device attributes. Nothing was copied.
            InputError: ``tensor`` is no strided tensor.
        """
        what = "mutable tensor" if name is None else f"mutable tensor {name!r}"
        _require_strided(what, tensor)

        def promote(provider: MemoryProvider) -> torch.Tensor:
            managed = self._copied(provider, tensor.detach(), is_read=False)
            if copy and shares_memory(managed, tensor):  # it maps memory instead of copying
                managed = self._copied(provider, detached_copy(tensor), is_read=False)
            return managed

        with torch.inference_mode(mode=False):  # what is made there does not count its changes
            placed, done = tensor.detach(), left_alone(self.policy)
            if not self.is_idle:
                placed, done = self._promoted(Decision(what, self), placed, promote, is_apart=copy)
        return (detached_copy(tensor) if copy and done.action != "promoted" else placed), done

    def input(self, x: torch.Tensor) -> tuple[torch.Tensor, MemoryDecision]:
        """Place an activation.

        Under ``PREFER_UNIFIED`` nothing is ever allocated or copied: the very same tensor comes back, prefetched if it
        is managed already. Under ``REQUIRE_UNIFIED`` an activation in ordinary memory is promoted to a temporary,
        through which gradients flow back to ``x``: drop it after the call, or give it back at once with
        ``release_input``.

        Raises:
            UnifiedMemoryError: Required, and no provider can; carries the device attributes.
            InputError: ``x`` is no strided tensor.
        """
        _require_strided("activation", x)
        if self.is_idle:
            return x, left_alone(self.policy)
        decision = Decision("activation", self)
        is_preferred = self.policy is UnifiedMemoryPolicy.PREFER_UNIFIED
        owner = decision.owner_of(x)
        if owner is not None and (is_preferred or is_on(x, self.device)):
            try:
                owner.prefetch(x, self.device)
            except PLUGIN_FAULTS as error:
                return x, decision.done("left", f"already managed; prefetch raised {told(error)}", owner, x)
            return x, decision.done("prefetched", "already managed; its pages move to the device", owner, x)
        if is_preferred and decision.usable:
            return x, decision.done("left", "in ordinary memory; activations are never copied under PREFER_UNIFIED")

        def promote(provider: MemoryProvider) -> torch.Tensor:
            to_managed = functools.partial(managed_by, provider, device=self.device, read_mostly=False, prefetch=True)
            managed: torch.Tensor = _Promotion.apply(x, to_managed)  # type: ignore[no-untyped-call]  # torch's
            return managed

        return self._promoted(decision, x, promote)

    def empty(self) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None:
        """Return ``empty(shape, dtype)`` in managed memory for whoever prepares weights.

        Returns:
            None where the policy wants no managed memory, or nobody has any. A tensor that no provider can allocate
            comes from ordinary memory; ``weight`` then decides about it like about any other.
        """
        usable = [] if self.is_idle else Decision("weight", self).usable
        if not usable:
            return None

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            for provider in usable:
                try:
                    managed: object = provider.empty(shape, dtype, self.device)
                    if isinstance(managed, torch.Tensor) and managed.shape == shape and managed.dtype == dtype:
                        note_provider(managed, provider)
                        return managed
                except PLUGIN_FAULTS:  # told once the provider is asked to promote what lies elsewhere
                    continue
            return torch.empty(shape, dtype=dtype, device=self.device)

        return empty

    def _promoted(
        self,
        decision: Decision,
        tensor: torch.Tensor,
        promote: Callable[[MemoryProvider], torch.Tensor],
        *,
        is_apart: bool = False,
    ) -> tuple[torch.Tensor, MemoryDecision]:
        """Promote a tensor by the first provider that can; ``is_apart`` if it may not stay where it is managed."""
        owner = decision.owner_of(tensor)
        if owner is not None and not is_apart and is_on(tensor, self.device):
            note_provider(tensor, owner)
            return tensor, decision.done("left", "already managed", owner, tensor)
        found = decision.ask("to_managed", promote)
        if found is not None:
            return found[1], decision.promoted(*found)
        if self.policy is UnifiedMemoryPolicy.PREFER_UNIFIED:
            return tensor, decision.fallback()
        raise decision.refusal()

    def _copied(self, provider: MemoryProvider, tensor: torch.Tensor, *, is_read: bool = True) -> torch.Tensor:
        """Return a copy of a tensor in a provider's memory; what is only read is prefetched."""
        managed = managed_by(provider, tensor.detach(), device=self.device, read_mostly=is_read, prefetch=is_read)
        return managed.requires_grad_(tensor.requires_grad)


class _Promotion(torch.autograd.Function):
    """The identity, whose result lies elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, promote: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.home = tensor.device
        return promote(tensor.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.home), None


def detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy outside any graph, which counts its own changes also where inference mode is on."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return detached_copy(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.clone() if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # the first where torch was built without it
        rule, hint = "a device that torch has here", f"{type(error).__name__}: {error}"
        raise ConfigError("placing a weight", name="device", rule=rule, value=str(device), hint=hint) from error
    return tensor.to(device)


def _require_strided(what: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InputError(f"placing a {what}", name="tensor", rule="a strided tensor", value=got)


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
        for provider in _installed() if providers is None else providers:
            if provider.name == decision.provider:
                provider.free(x)
