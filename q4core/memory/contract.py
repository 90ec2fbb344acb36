"""The contract of providers of managed memory, and the record of a decision about one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from q4core.policy.config import UnifiedMemoryPolicy

DISABLE_VARIABLE = "Q4_DISABLE_UM"

MemoryAction = Literal["left", "promoted", "mapped", "prefetched", "refused", "fallback"]


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


@attrs.frozen
class Placement:
    """Which of the memories that CPU and GPU share a tensor lies in.

    Args:
        kind: ``"managed"``: the driver's own. ``"pageable"``: ordinary system memory, which the GPU reads where it
            lies. ``"pinned"``: system memory that stays put, mapped for the GPU.
        decided_by: The device attribute that decided, with its value: ``"concurrentManagedAccess=1"``.
    """

    kind: str
    decided_by: str

    def __str__(self) -> str:
        """Return both, as decisions state them."""
        return f"{self.kind} memory ({self.decided_by})"


@runtime_checkable
class MemoryProvider(Protocol):
    """Allocates managed memory: one virtual address for CPU and GPU. Comes from a plugin, through a hook.

    A method that can't do its duty raises; the core turns that into a fallback or an error, as the policy says.

    Optional methods: ``map(tensor, *, device) -> Tensor | None``, a tensor on ``device`` over the very bytes of a CPU
    tensor, which it keeps alive, or None where the device can't read those well;
    ``placement_of(tensor) -> Placement | None``, where a tensor of this provider's lies, mapped ones included; and
    ``record_stream(tensor, stream)``, which keeps CUDA memory, once it comes back, until a stream (its handle) has
    passed what is queued there by then. Without it the memory must wait for every stream by itself.
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
            tensor: Detached, on any device; neither changed nor retained, and no byte of it is in the result.
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
    """What became of one tensor, and why.

    Args:
        policy: The policy that was applied.
        action: ``"left"``: stays where it is, as the policy wants it, or because it is managed already. ``"promoted"``:
            copied into managed memory. ``"mapped"``: read by the device where it lies, uncopied. ``"prefetched"``:
            managed already; its pages were moved to the device. ``"fallback"``: preferred and impossible; stays where
            it is. ``"refused"``: required and impossible; such a decision is found in the ``details["decision"]`` of
            the ``UnifiedMemoryError``.
        reason: One sentence that says why.
        provider: Name of the provider that holds the tensor, or None.
        attributes: The facts that decided: the providers' device attributes, or what torch says of the device.
        bytes: Bytes put into managed memory by this decision; 0 unless promoted.
        placement: Where the tensor lies now, and which device attribute decided that; None where no provider says.
    """

    policy: UnifiedMemoryPolicy
    action: MemoryAction
    reason: str
    provider: str | None = None
    attributes: Mapping[str, Any] = attrs.field(factory=dict, converter=_to_dict, hash=False)
    bytes: int = 0
    placement: Placement | None = None
