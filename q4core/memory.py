"""The unified-memory contract: what a provider of managed memory offers, and what each policy makes of it.

Everything here is a function of its arguments and of ``Q4_DISABLE_UM``: nothing is registered, kept or logged. Each
``apply_*`` function returns the tensor to use and a ``MemoryDecision`` that says what was done and why; the caller
reports it. Only a provider allocates managed memory; the core has none of its own.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import torch

from q4core.errors import PLUGIN_FAULTS, ConfigError, InputError, PluginError, UnifiedMemoryError
from q4core.policy import UnifiedMemoryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "DISABLE_VARIABLE",
    "Availability",
    "MemoryAction",
    "MemoryDecision",
    "MemoryProvider",
    "apply_input_policy",
    "apply_mutable_policy",
    "apply_policy",
    "detached_copy",
    "release_input",
]

DISABLE_VARIABLE = "Q4_DISABLE_UM"

MemoryAction = Literal["left", "promoted", "prefetched", "refused", "fallback"]


def _to_dict(facts: Mapping[str, Any]) -> dict[str, Any]:
    return dict(facts)


@attrs.frozen
class Availability:
    """A provider's answer for one device; true where managed memory can be had there.

    Args:
        is_available: Whether the provider can allocate managed memory that ``device`` reaches.
        reason: One sentence that says why, or why not.
        attributes: The queried device attributes that decided, by the driver's own names
            (``concurrentManagedAccess``, ``pageableMemoryAccess``, …). Never a product's name.
    """

    is_available: bool
    reason: str
    attributes: Mapping[str, Any] = attrs.field(factory=dict, converter=_to_dict, hash=False)

    def __bool__(self) -> bool:
        """Return ``is_available``, so that a bare ``if provider.is_available(device)`` is right too."""
        return self.is_available


@runtime_checkable
class MemoryProvider(Protocol):
    """Allocates managed memory: one virtual address for CPU and GPU. Comes from a plugin, through a hook.

    A method that can't do its duty raises; the core turns that into a fallback or an error, as the policy says.
    """

    name: str

    def is_available(self, device: torch.device) -> Availability:
        """Answer for one device; called often, so remember what the driver said."""
        ...

    def is_managed(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory is managed, by the driver's own word."""
        ...

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        """Return the same values, shape and dtype in managed memory that ``device`` reaches.

        Args:
            tensor: Detached, on any device; neither changed nor kept.
            device: Who will compute with it.
            read_mostly: Written once, then only read; the driver may keep a copy at each reader.
            prefetch: Move the pages to ``device`` now instead of at the first touch.
        """
        ...

    def prefetch(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Move the pages of a managed tensor to ``device``; the address stays."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous managed tensor with unspecified content."""
        ...

    def free(self, tensor: torch.Tensor) -> None:
        """Take back a tensor's memory once the device work queued so far is done.

        Memory that is not given back so must go when the last tensor over it goes.
        """
        ...


@attrs.frozen
class MemoryDecision:
    """What was done with one tensor, and why.

    Args:
        policy: The policy that was applied.
        action: ``"left"``: stays where it is, as the policy wants it, or because it is managed already. ``"promoted"``:
            copied into managed memory. ``"prefetched"``: managed already; its pages were moved to the device.
            ``"fallback"``: preferred and impossible; stays where it is. ``"refused"``: required and impossible; such a
            decision is found in the ``details["decision"]`` of the ``UnifiedMemoryError``.
        reason: One sentence that says why.
        provider: Name of the provider that holds the tensor, or None.
        attributes: The facts that decided: the providers' device attributes, or what torch says of the device.
        bytes: Bytes put into managed memory by this decision; 0 unless promoted.
    """

    policy: UnifiedMemoryPolicy
    action: MemoryAction
    reason: str
    provider: str | None = None
    attributes: Mapping[str, Any] = attrs.field(factory=dict, converter=_to_dict, hash=False)
    bytes: int = 0


def apply_policy(
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a weight, which is written once and then read, as the policy says.

    Args:
        tensor: Any shape and dtype. What is promoted comes back detached, with the same ``requires_grad``.
        policy: What is asked for.
        device: Who will compute with it.
        providers: Asked in the order of their names; the first that can, does.
        environment: Taken instead of ``os.environ``.

    Returns:
        The tensor to use (the very same one unless promoted), and the decision.

    Raises:
        UnifiedMemoryError: Required, and no provider can; carries the device attributes.
        ConfigError: ``policy``, ``device`` or ``Q4_DISABLE_UM`` is not legal.
        InputError: ``tensor`` is no strided tensor.
    """
    search = _Search("weight", tensor, policy, device, providers, environment)
    return _promoted(search, tensor, read_mostly=True, prefetch=True)


def apply_mutable_policy(  # noqa: PLR0913  # one argument per fact that decides
    tensor: torch.Tensor,
    policy: UnifiedMemoryPolicy,
    *,
    device: torch.device | str,
    providers: Iterable[MemoryProvider] = (),
    copy: bool = True,
    environment: Mapping[str, str] | None = None,
) -> tuple[torch.Tensor, MemoryDecision]:
    """Place a tensor that will be written again and again, apart from every other holder of it, as the policy says.

    Args:
        tensor: Any shape and dtype; detached, and cloned before anything else is done with it.
        policy: What is asked for.
        device: Who will compute with it.
        providers: Asked in the order of their names; the first that can, does.
        copy: False for the sole owner of ``tensor``: no clone is made, and where nothing is promoted the result shares
            its memory.
        environment: Taken instead of ``os.environ``.

    Returns:
        The detached tensor to use, fit for ``MutableTensor(…, copy=False)``, and the decision.

    Raises:
        UnifiedMemoryError: Required, and no provider can; carries the device attributes. Nothing was copied.
        ConfigError: ``policy``, ``device`` or ``Q4_DISABLE_UM`` is not legal.
        InputError: ``tensor`` is no strided tensor.
    """
    search = _Search("mutable tensor", tensor, policy, device, providers, environment)
    search.refuse_early()
    own = detached_copy(tensor) if copy else tensor.detach()
    return _promoted(search, own, read_mostly=False, prefetch=False)


def apply_input_policy(
    x: torch.Tensor,
    policy: UnifiedMemoryPolicy,
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
    search = _Search("activation", x, policy, device, providers, environment)
    if search.is_idle:
        return x, search.idle_decision()
    holder = search.holder_of(x)
    if holder is not None:
        try:
            holder.prefetch(x, search.device)
        except PLUGIN_FAULTS as error:
            return x, search.decide("left", f"already managed; prefetch raised {_told(error)}", holder)
        return x, search.decide("prefetched", "already managed; its pages move to the device", holder)
    if policy is UnifiedMemoryPolicy.PREFER_UNIFIED:
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


def _promoted(
    search: _Search, tensor: torch.Tensor, *, read_mostly: bool, prefetch: bool
) -> tuple[torch.Tensor, MemoryDecision]:
    if search.is_idle:
        return tensor, search.idle_decision()
    holder = search.holder_of(tensor)
    if holder is not None:
        return tensor, search.decide("left", "already managed", holder)
    for provider in search.usable:
        promote = functools.partial(
            _managed_by, provider, device=search.device, read_mostly=read_mostly, prefetch=prefetch
        )
        try:
            if search.is_activation:
                managed: torch.Tensor = _Promotion.apply(tensor, promote)  # type: ignore[no-untyped-call]  # torch's
            else:
                managed = promote(tensor.detach())
        except PLUGIN_FAULTS as error:
            search.reasons.append(f"{provider.name}: to_managed: {_told(error)}")
            continue
        if not search.is_activation:
            managed.requires_grad_(tensor.requires_grad)
        return managed, search.decide("promoted", f"copied into memory of {provider.name}", provider, tensor.nbytes)
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


def _managed_by(
    provider: MemoryProvider, tensor: torch.Tensor, *, device: torch.device, read_mostly: bool, prefetch: bool
) -> torch.Tensor:
    """Return the provider's copy, after a look at whether it is what was asked for."""
    managed = provider.to_managed(tensor, device=device, read_mostly=read_mostly, prefetch=prefetch)
    if not isinstance(managed, torch.Tensor):
        raise PluginError("to_managed", name="result", rule="a tensor", value=type(managed).__name__)
    if (managed.shape, managed.dtype) != (tensor.shape, tensor.dtype):
        wanted, got = (f"{item.dtype} {list(item.shape)}" for item in (tensor, managed))
        raise PluginError("to_managed", name="result", rule=wanted, value=got)
    if not provider.is_managed(managed):
        raise PluginError("to_managed", name="result", rule="in managed memory", value="ordinary memory")
    return managed


class _Search:
    """One decision in the making: the question, and what the providers answered."""

    def __init__(  # noqa: PLR0913  # one argument per fact that decides
        self,
        what: str,
        tensor: torch.Tensor,
        policy: UnifiedMemoryPolicy,
        device: torch.device | str,
        providers: Iterable[MemoryProvider],
        environment: Mapping[str, str] | None,
    ) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InputError(f"placing a {what}", name="tensor", rule="a strided tensor", value=got)
        if not isinstance(policy, UnifiedMemoryPolicy):
            raise ConfigError(f"placing a {what}", name="policy", rule="a UnifiedMemoryPolicy", value=policy)
        self.what, self.policy, self.device = what, policy, _to_device(device)
        self.is_activation = what == "activation"
        self.is_turned_off = _is_turned_off(os.environ if environment is None else environment)
        self.usable: list[MemoryProvider] = []
        self.reasons: list[str] = []
        self.attributes: dict[str, Any] = {}
        if self.is_idle:
            return
        if self.is_turned_off:
            self.reasons.append(f"{DISABLE_VARIABLE}=1 turns promotion off")
            self.attributes[DISABLE_VARIABLE] = "1"
            return
        self._ask(sorted(providers, key=lambda provider: provider.name))

    def _ask(self, providers: Sequence[MemoryProvider]) -> None:
        if not providers:
            self.reasons.append("no provider of unified memory is there")
        for provider in providers:
            try:
                answer: Any = provider.is_available(self.device)
            except PLUGIN_FAULTS as error:
                self.reasons.append(f"{provider.name}: is_available raised {_told(error)}")
                continue
            if not isinstance(answer, Availability):
                kind = type(answer).__name__
                self.reasons.append(f"{provider.name}: is_available must return Availability, not {kind}")
                continue
            prefix = f"{provider.name}." if len(providers) > 1 else ""
            self.attributes |= {f"{prefix}{key}": value for key, value in answer.attributes.items()}
            if answer.is_available:
                self.usable.append(provider)
            else:
                self.reasons.append(f"{provider.name}: {answer.reason}")

    @property
    def is_idle(self) -> bool:
        """Whether the policy, or the environment under PREFER, wants nothing to be done."""
        return self.policy is UnifiedMemoryPolicy.DISABLED or (
            self.is_turned_off and self.policy is UnifiedMemoryPolicy.PREFER_UNIFIED
        )

    def idle_decision(self) -> MemoryDecision:
        if self.policy is UnifiedMemoryPolicy.DISABLED:
            return MemoryDecision(policy=self.policy, action="left", reason="the policy is DISABLED")
        facts = {DISABLE_VARIABLE: "1"}
        reason = f"{DISABLE_VARIABLE}=1 turns promotion off"
        return MemoryDecision(policy=self.policy, action="left", reason=reason, attributes=facts)

    def holder_of(self, tensor: torch.Tensor) -> MemoryProvider | None:
        """Return the usable provider in whose memory the tensor lies already."""
        for provider in self.usable:
            try:
                if provider.is_managed(tensor):
                    return provider
            except PLUGIN_FAULTS as error:
                self.reasons.append(f"{provider.name}: is_managed raised {_told(error)}")
        return None

    def complaint(self) -> str:
        return "; ".join(self.reasons)

    def decide(
        self, action: MemoryAction, reason: str, provider: MemoryProvider | None = None, size_bytes: int = 0
    ) -> MemoryDecision:
        attributes = dict(self.attributes)
        if action in {"fallback", "refused"}:
            attributes = {**_device_facts(self.device), "provider": None, **attributes}
        name = None if provider is None else provider.name
        return MemoryDecision(self.policy, action, reason, name, attributes, size_bytes)

    def refuse_early(self) -> None:
        """Raise before anything is copied where it is known already that nobody can."""
        if self.policy is UnifiedMemoryPolicy.REQUIRE_UNIFIED and not self.usable:
            raise self.refusal()

    def refusal(self) -> UnifiedMemoryError:
        decision = self.decide("refused", self.complaint())
        unset = f"Unset {DISABLE_VARIABLE}, or ask for PREFER_UNIFIED."
        install = "Install a plugin that provides it for this device, or ask for PREFER_UNIFIED."
        return UnifiedMemoryError(
            f"{self.what} under REQUIRE_UNIFIED",
            name="memory",
            rule=f"managed memory for device {self.device}",
            value=decision.reason,
            hint=unset if self.is_turned_off else install,
            attributes=decision.attributes,
            decision=decision,
        )


def _to_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError("unified memory", name="device", rule="a torch device", value=device) from None


def _is_turned_off(environment: Mapping[str, str]) -> bool:
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


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
