"""``WeightInfo``: what ``Q4Linear.weight`` answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4core.weight import PackedWeight, WeightSpec

__all__ = ["WeightInfo"]


@attrs.frozen
class WeightInfo:
    """What ``Q4Linear.weight`` answers: the facts of a dense weight, without one.

    Each tensor that a state dict holds as ``weight.<field>`` is an attribute too (``layer.weight.qdata``), exported
    when it is asked for; torch's distributed checkpoints look the keys of a state dict up in this way.

    Args:
        shape: (N, K).
        dtype: dtype of the activations that the layer takes.
        device: Where it runs.
        format: Name of the format.
        nbytes: Bytes that the packed weight takes.
        spec: What the packed weight is but for its tensors.
        read: Exports the packed weight.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    format: str
    nbytes: int
    requires_grad: bool = False
    spec: WeightSpec = attrs.field(kw_only=True, repr=False)
    read: Callable[[], PackedWeight] = attrs.field(kw_only=True, repr=False, eq=False)

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return a tensor of the packed weight."""
        if name not in self.spec.fields:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        tensor: torch.Tensor = getattr(self.read(), name)
        return tensor

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one extent of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return 2."""
        return len(self.shape)

    def numel(self) -> int:
        """Return N × K."""
        return self.shape.numel()
