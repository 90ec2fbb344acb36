"""``LayerProjection``: synapses between maps of neurons that are a layer of torch's, such as a convolution."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_snn.population import check_name
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_snn.population import Population

__all__ = ["LayerProjection", "Scale", "SumPool2d"]


class SumPool2d(nn.Module):
    """Sums over windows of maps, as sinabs and NIR have them.

    Args:
        kernel_size: Height and width of a window, or one number for both.
        stride: Distance of windows, likewise; None for windows that touch.
        padding: Zeros at each border, likewise.
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.kernel_size = _pair(kernel_size)
        self.stride = self.kernel_size if stride is None else _pair(stride)
        self.padding = _pair(padding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., C, H', W'] from [..., C, H, W]."""
        sums: torch.Tensor = nn.functional.avg_pool2d(
            x, self.kernel_size, self.stride, self.padding, divisor_override=1
        )
        return sums

    def extra_repr(self) -> str:
        """Return what torch prints."""
        return f"{self.kernel_size}, stride={self.stride}, padding={self.padding}"


class Scale(nn.Module):
    """The product with a number for each value.

    Args:
        scale: float, of the shape of the maps, or of one that expands to it.
    """

    scale: torch.Tensor

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, …] from [B, …]."""
        return x * self.scale.expand(x.shape[1:])


class LayerProjection(nn.Module):
    """Synapses between maps of neurons, which a layer is: ``nn.Conv2d``, a pooling, or an ``nn.Sequential`` of such.

    The layer trains, and runs packed, as it does anywhere: ``q4_nn.STEConv2d`` and ``q4_nn.STELinear`` train in four
    bits, and ``q4_nn.pack_`` packs them.

    Args:
        source: Whose spikes it takes.
        target: Whose input it gives.
        layer: Takes [B, *shape], and returns one value for each target neuron, of any shape.
        shape: In which the source's neurons lie, such as (channels, height, width), row by row. Defaults to (size,).
        delay: Steps that a spike takes. 0 is the same step; a cycle needs at least one step.
        name: Defaults to ``source->target``.

    Raises:
        ConfigError: The delay or the shape is not legal, or the layer takes another shape, or gives another number of
            values than there are targets.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        source: Population,
        target: Population,
        layer: nn.Module,
        *,
        shape: Sequence[int] | None = None,
        delay: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.source, self.target = source.name, target.name
        self.source_size, self.target_size = source.size, target.size
        self.name = f"{source.name}->{target.name}" if name is None else name
        check_name("projection", self.name, ".")
        what = f"projection {self.name!r}"
        if not isinstance(delay, int) or isinstance(delay, bool) or delay < 0:
            raise ConfigError(what, name="delay", rule="steps, 0 or more", value=delay)
        self.delay = delay
        self.shape = (source.size,) if shape is None else tuple(shape)
        """In which the source's neurons lie."""
        if math.prod(self.shape) != source.size or min(self.shape, default=0) < 1:
            raise ConfigError(what, name="shape", rule=f"of {source.size} neurons, as the source has", value=self.shape)
        like = next((item for item in (*layer.parameters(), *layer.buffers()) if item.is_floating_point()), None)
        try:
            with torch.no_grad():
                found = layer(torch.zeros(1, *self.shape) if like is None else like.new_zeros(1, *self.shape))
        except (RuntimeError, ValueError, TypeError) as error:
            rule = f"one that takes [B, {', '.join(map(str, self.shape))}]"
            raise ConfigError(what, name="layer", rule=rule, value=f"{type(layer).__name__}: {error}") from error
        self.target_shape = tuple(found.shape[1:])
        """In which the layer gives the target's input."""
        if math.prod(self.target_shape) != target.size:
            rule = f"one that gives {target.size} values, as the target has neurons"
            raise ConfigError(what, name="layer", rule=rule, value=list(self.target_shape))
        self.synapses = layer

    def forward(self, spikes: torch.Tensor) -> torch.Tensor:
        """Return [..., target_size] from spikes [..., source_size].

        Raises:
            InputError: Spikes are of another size.
        """
        if spikes.shape[-1:] != (self.source_size,):
            rule = f"of shape [..., {self.source_size}]"
            raise InputError(f"projection {self.name!r}", name="spikes", rule=rule, value=list(spikes.shape))
        current: torch.Tensor = self.synapses(spikes.reshape(-1, *self.shape))
        return current.reshape(*spikes.shape[:-1], self.target_size)

    def numbers(self) -> tuple[Any, ...]:
        """Return what decides what it gives: the layer as torch prints it, shapes, and its tensors."""
        return (str(self.synapses), self.shape, *self.synapses.state_dict().values())

    def extra_repr(self) -> str:
        """Return what torch prints."""
        return f"{self.shape} → {self.target_shape}, delay={self.delay}"


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
