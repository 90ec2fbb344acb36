"""``PreparedWeight``: a weight that a layer runs, found by the registered ops by the address of its tag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.machine.torch_state import outside_inference

if TYPE_CHECKING:
    from q4core.backend import Prepared
    from q4core.memory import MemoryDecision
    from q4core.policy.config import SessionConfig
    from q4core.selection.plan import Plan
    from q4core.selection.result import Selection
    from q4core.weight import WeightSpec


@attrs.define(eq=False, kw_only=True)
class LayerWeight:
    """A weight as a layer holds it; of this class itself it can't run: on the meta device, closed, or not there yet.

    Args:
        spec: The weight but for its tensors; None where there is no weight yet.
        labels: Its name, dialect and notes.
        config: The resolved configuration.
        dtype: dtype of the activations.
        device: Where the layer runs.
        tensors: The weight as uint8: what was prepared, or tensors on the meta device.
    """

    spec: WeightSpec | None
    labels: dict[str, Any]
    config: SessionConfig
    dtype: torch.dtype
    device: torch.device
    tensors: tuple[torch.Tensor, ...] = ()

    def without_tensors(self) -> LayerWeight:
        """Return the facts of the weight alone."""
        return LayerWeight(spec=self.spec, labels=self.labels, config=self.config, dtype=self.dtype, device=self.device)


@attrs.define(eq=False, kw_only=True)
class PreparedWeight(LayerWeight):
    """A prepared and proven weight, with the counters of its calls.

    Args:
        plan: How it is called.
        tensors: uint8 buffers: the backend's, then the source's where the backend has no export. ``buffers`` are these
            and the tag; others are somebody else's (a functional call's).
        selection: What was chosen, and why not the others.
        memory: What became of each of them under the unified-memory policy; empty under DISABLED.
        source_bytes: Bytes of the source held next to the prepared ones; 0 where the backend can export.
    """

    spec: WeightSpec
    plan: Plan
    selection: Selection
    memory: tuple[MemoryDecision, ...] = ()
    source_bytes: int = 0
    buffers: tuple[torch.Tensor, ...] = attrs.field(init=False)
    address: int = attrs.field(init=False)
    prepared: Prepared = attrs.field(init=False)
    """The backend's own view of the buffers."""
    counts: list[int] = attrs.field(init=False)
    """Calls by segment of M."""
    outlier_rows: int = attrs.field(init=False, default=0)
    """Rows of x that had outliers."""
    input_memory: dict[str, int] = attrs.field(init=False, factory=dict)
    """Calls by what became of x under the unified-memory policy."""

    def __attrs_post_init__(self) -> None:
        """Make the tag, and ask the buffers once for what a call needs to know."""
        with outside_inference():
            tag = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if all(tensor.is_shared() for tensor in self.tensors):
            tag.share_memory_()  # so that all of a shared layer is shared
        self.buffers, self.address = (*self.tensors, tag), tag.data_ptr()
        self.prepared = self.plan.prepared(self.tensors)
        self.counts = [0] * len(self.plan.segments)


LATEST_CHANGE = [object()]
"""Its item is replaced after any layer has taken or dropped a weight."""
BY_TAG: dict[int, PreparedWeight] = {}
"""Weights by the address of their tag, for the ops."""


def register_weight(weight: PreparedWeight) -> None:
    """Let the ops find a weight by its tag."""
    BY_TAG[weight.address] = weight


def forget_weight(weight: PreparedWeight) -> None:
    """Undo ``register_weight``, unless the address has a new owner."""
    if BY_TAG.get(weight.address) is weight:
        del BY_TAG[weight.address]
