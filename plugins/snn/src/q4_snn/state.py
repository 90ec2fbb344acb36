"""``NetworkState``: the state of a network between two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["NetworkState"]


@attrs.frozen(eq=False)
class NetworkState:
    """The state of a network after a step.

    Args:
        neurons: Population's name → its state tensors [B, n], by the order of ``neuron.states``.
        history: Name of a population with delayed projections → what it gave, the last step first, as far back as its
            longest delay needs.
        coming: Name of a projection with ``coming`` → what is on its way there.
        clock: Number of steps so far.
    """

    neurons: Mapping[str, tuple[torch.Tensor, ...]]
    history: Mapping[str, tuple[torch.Tensor, ...]]
    coming: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    clock: int = 0

    def detach(self) -> NetworkState:
        """Return the same numbers without gradients: what a call that goes on from them records, ends there."""
        return attrs.evolve(
            self,
            neurons={name: tuple(item.detach() for item in items) for name, items in self.neurons.items()},
            history={name: tuple(item.detach() for item in items) for name, items in self.history.items()},
            coming={name: item.detach() for name, item in self.coming.items()},
        )
