"""``Placer``: placement of weights, mutable tensors and activations in the memory of providers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from q4_um_managed.copies import copied_by, copy_into, is_on, mapped_by, shares_memory
from q4_um_managed.decision import Decision, summary_of
from q4core import ConfigError, UnifiedMemoryPolicy, default_registry
from q4core.memory import MemoryPlacer, check_strided, detached_copy, note_provider
from q4core.plugin_api import PLUGIN_FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from q4core.memory import MemoryDecision, MemoryProvider

__all__ = ["Placer"]


class Placer(MemoryPlacer):
    """Places tensors for one device by a policy.

    Each method returns the tensor to use and a ``MemoryDecision`` that says what was done and why.

    Args:
        policy: The policy.
        device: The device that computes.
        providers: Asked in the order of their names; the first that can is used. Defaults to the installed plugins'.
        environment: Defaults to ``os.environ``.

    Raises:
        ConfigError: ``policy``, ``device``, a provider or ``Q4_DISABLE_UM`` is not legal.
    """

    name = "um-managed"
    absence = (
        "there is no provider of unified memory (q4-um-managed asks a CUDA device for managedMemory, "
        "concurrentManagedAccess and the others)"
    )
    remedy = "Install a plugin that provides it."
    copy_into = staticmethod(copy_into)

    def __init__(
        self,
        policy: UnifiedMemoryPolicy | str,
        *,
        device: torch.device | str,
        providers: Iterable[MemoryProvider] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(policy, device=device, environment=environment)
        given = list(providers or ())
        for provider in given:
            if not isinstance(getattr(provider, "name", None), str):
                hint = "Give a list of providers, or leave it out for those that are installed."
                value = type(provider).__name__
                raise ConfigError("unified memory", name="providers", rule="memory providers", value=value, hint=hint)
        if self.is_idle:
            given = []
        elif providers is None:
            given = list(default_registry().memory_providers())
        self._providers = sorted(given, key=lambda provider: provider.name)

    def weight(self, tensor: torch.Tensor, layer: str | None = None) -> tuple[torch.Tensor, MemoryDecision]:
        """Place a weight, which is written once and then read.

        Args:
            tensor: Any shape and dtype. What is promoted comes back detached, with the same ``requires_grad``.
            layer: The layer's name, for messages.

        Raises:
            UnifiedMemoryError: Required, and no provider can; carries the device attributes.
            InputError: ``tensor`` is no strided tensor.
        """
        if not self._providers:
            return super().weight(tensor, layer)
        decision = self._decision("weight" if layer is None else f"weight of layer {layer!r}", tensor)

        def promote(provider: MemoryProvider) -> torch.Tensor:
            managed = copied_by(provider, tensor, self.device, read_mostly=True, prefetch=True)
            return managed.requires_grad_(tensor.requires_grad)

        return self._promoted(decision, tensor, promote)

    def source(self, tensor: torch.Tensor) -> tuple[torch.Tensor, MemoryDecision]:
        """Bring a tensor of a weight to the device that will prepare it, with as few copies as the policy allows.

        Where the device reads it in place (a mapped checkpoint, say), nothing is copied. Else it is written once, into
        managed memory, so that a backend that retains it unchanged has it there already. If neither is possible, it is
        copied to the device's ordinary memory; ``weight`` then decides about the prepared tensors. The tensor has any
        shape and dtype. It is not changed, and held only if mapped.

        Raises:
            ConfigError: torch has no such device here.
            InputError: ``tensor`` is no strided tensor.
        """
        if not self._providers:
            return super().source(tensor)
        decision = self._decision("weight", tensor)
        if is_on(tensor, self.device):
            return tensor, decision.made("left", "on its device already")
        found = decision.ask("map", lambda provider: mapped_by(provider, tensor, self.device))
        if found is not None:
            return found[1], decision.made("mapped", "read where it lies", *found)
        copied = functools.partial(copied_by, tensor=tensor, device=self.device, read_mostly=True, prefetch=True)
        found = decision.ask("to_managed", copied)
        if found is not None:
            return found[1], decision.promoted(*found)
        return self.moved(tensor), decision.unplaced(is_rejected=False)

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
        if not self._providers:
            return super().mutable(tensor, copy=copy, name=name)
        decision = self._decision("mutable tensor" if name is None else f"mutable tensor {name!r}", tensor)

        def promote(provider: MemoryProvider) -> torch.Tensor:
            managed = copied_by(provider, tensor, self.device)
            if copy and shares_memory(managed, tensor):  # it maps memory instead of copying
                managed = copied_by(provider, detached_copy(tensor), self.device)
            return managed

        with torch.inference_mode(mode=False):  # a tensor made in inference mode does not count its changes
            placed, made = self._promoted(decision, tensor.detach(), promote, is_apart=copy)
        return (detached_copy(tensor) if copy and made.action != "promoted" else placed), made

    def input(self, x: torch.Tensor) -> tuple[torch.Tensor, MemoryDecision]:
        """Place an activation.

        Under ``PREFER_UNIFIED`` nothing is ever allocated or copied: the very same tensor comes back, prefetched if it
        is managed already. Under ``REQUIRE_UNIFIED`` an activation in ordinary memory is promoted to a temporary,
        through which gradients flow back to ``x``: drop it after the call, or give it back at once with
        ``memory.release_input``.

        Raises:
            UnifiedMemoryError: Required, and no provider can; carries the device attributes.
            InputError: ``x`` is no strided tensor.
        """
        if not self._providers:
            return super().input(x)
        decision = self._decision("activation", x)
        is_preferred = self.policy is UnifiedMemoryPolicy.PREFER_UNIFIED
        owner = decision.owner_of(x)
        if owner is not None and (is_preferred or is_on(x, self.device)):
            try:
                owner.prefetch(x, self.device)
            except PLUGIN_FAULTS as error:
                return x, decision.made("left", f"already managed; prefetch raised {summary_of(error)}", owner, x)
            return x, decision.made("prefetched", "already managed; its pages move to the device", owner, x)
        if is_preferred and decision.usable:
            return x, decision.made("left", "in ordinary memory; activations are never copied under PREFER_UNIFIED")

        def promote(provider: MemoryProvider) -> torch.Tensor:
            copied = functools.partial(copied_by, provider, device=self.device, prefetch=True)
            managed: torch.Tensor = _Promotion.apply(x, copied)  # type: ignore[no-untyped-call]  # torch's
            return managed

        return self._promoted(decision, x, promote)

    def empty(self) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None:
        """Return ``empty(shape, dtype)`` in managed memory for a backend that prepares weights.

        Returns:
            None where the policy wants no managed memory, or no provider has any. A tensor that no provider can
            allocate comes from ordinary memory; ``weight`` then decides about it like about any other.
        """
        usable = Decision("weight", self, self._providers).usable if self._providers else []
        if not usable:
            return None

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            for provider in usable:
                try:
                    managed: object = provider.empty(shape, dtype, self.device)
                    if isinstance(managed, torch.Tensor) and managed.shape == shape and managed.dtype == dtype:
                        note_provider(managed, provider)
                        return managed
                except PLUGIN_FAULTS:  # reported when the provider is asked to promote what lies elsewhere
                    continue
            return torch.empty(shape, dtype=dtype, device=self.device)

        return empty

    def _decision(self, what: str, tensor: torch.Tensor) -> Decision:
        check_strided(what, tensor)
        return Decision(what, self, self._providers)

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
            return tensor, decision.made("left", "already managed", owner, tensor)
        found = decision.ask("to_managed", promote)
        if found is not None:
            return found[1], decision.promoted(*found)
        return tensor, decision.unplaced()


class _Promotion(torch.autograd.Function):
    """The identity, whose result lies elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, promote: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.home = tensor.device
        return promote(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.home), None
