"""Projections: the protocol of synapses, and dense ones that train in four bits and run packed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from q4_nn import FilledLinear, STELinear
from q4_snn.population import check_name
from q4_snn.products import SpikeProduct
from q4core import ConfigError, InputError, Q4Linear, dequantize

if TYPE_CHECKING:
    from q4_snn.population import Population

__all__ = [
    "EventProduct",
    "Product",
    "Projection",
    "Synapses",
    "coming_of",
    "lacking",
    "memory_of",
    "numbers_of",
    "packed_layer",
    "product_of",
]

Product = Callable[..., torch.Tensor]
"""Function that returns the input of a target [B, n] from spikes [B, m] and from what is on its way."""
_ROWS_AHEAD = 64
"""Rows of spikes that go in one product, where they are known: their results, of some steps, stay in a cache."""


class Synapses(Protocol):
    """The protocol of a projection: every ``nn.Module`` that has it may be one, in a network and on actors.

    Three methods and two attributes are optional:

    - ``coming(batch)`` returns a tensor for what is on its way, at rest; ``SparseProjection`` has one of shape [steps,
      B, target_size]. Each call then gets spikes, that tensor, which it may write, and how many steps were taken
      before. A projection that changes with the spikes stores the change there: state of its own is no part of a
      network's state, and an actor that is restarted begins with what the projection was at first.
    - ``memory_steps`` says that what is on its way depends on the last so many calls alone. Actors then store the
      spikes of these steps, as bits, and make it again from them; else they store it as it is.
    - ``sees_target``: where it is True, a call also gets ``fired=``, what the target gave a step ago [B, target_size],
      or None before the first step.
    - ``for_run()`` returns what is called in the projection's place in a run of many steps.
    - ``numbers()`` returns the tensors that decide what it gives, for checkpoints of actors. Defaults to the values of
      ``state_dict()``.

    So are two attributes. ``dt`` is the seconds of a step, and must be that of the target's neurons. Where ``reversal``
    is a number, the projection gives conductances g [B, target_size], and their current is ``g · (reversal - mem)``,
    with the target's membrane before the step.
    """

    name: str
    source: str
    target: str
    source_size: int
    target_size: int
    delay: int

    def __call__(self, spikes: torch.Tensor, *on_its_way: Any) -> torch.Tensor:
        """Return the input of the target [..., target_size] from the source's spikes [..., source_size]."""


def lacking(item: object) -> list[str]:
    """Return what an object lacks of the protocol ``Synapses``."""
    return [name for name in Synapses.__annotations__ if not hasattr(item, name)]


def product_of(item: Synapses) -> Product:
    """Return what computes a projection in a run of many steps."""
    for_run = getattr(item, "for_run", None)
    return item if for_run is None else for_run()


def coming_of(item: Synapses, batch: int) -> torch.Tensor | None:
    """Return what is on its way in a projection at rest; None where it has no such tensor."""
    coming = getattr(item, "coming", None)
    return None if coming is None else coming(batch)


def memory_of(item: Synapses) -> int | None:
    """Return how many calls decide what is on its way in a projection; None where all of them may."""
    found: int | None = getattr(item, "memory_steps", None)
    return found


def numbers_of(item: Synapses) -> tuple[Any, ...]:
    """Return the tensors that decide what a projection gives."""
    module: Any = item
    return tuple(module.numbers() if hasattr(module, "numbers") else module.state_dict().values())


class Projection(nn.Module):
    """Synapses from each neuron of a population to each of another.

    ``synapses`` is an ``nn.Linear``; with a format, a ``q4_nn.STELinear``, which trains in four bits, and a packed
    layer after ``q4_nn.pack_(network)``.

    Args:
        source: Whose spikes it takes.
        target: Whose input it gives.
        format: Name of a 4-bit format, or None for float.
        delay: Steps that a spike takes. 0 is the same step; a cycle needs at least one step.
        bias: Whether each target neuron gets a constant input too.
        name: Defaults to ``source->target``.

    Raises:
        ConfigError: The delay is not legal.
        FormatError: There is no such format.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        source: Population,
        target: Population,
        *,
        format: str | None = None,  # noqa: A002  # the contract's name
        delay: int = 0,
        bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.source, self.target = source.name, target.name
        self.source_size, self.target_size = source.size, target.size
        self.name = f"{source.name}->{target.name}" if name is None else name
        check_name("projection", self.name, ".")
        if not isinstance(delay, int) or isinstance(delay, bool) or delay < 0:
            raise ConfigError(f"projection {self.name!r}", name="delay", rule="steps, 0 or more", value=delay)
        self.delay = delay
        self.is_binary = source.is_binary
        self.synapses: nn.Module = (
            nn.Linear(source.size, target.size, bias)
            if format is None
            else STELinear(source.size, target.size, bias, format=format)
        )

    def forward(self, spikes: torch.Tensor) -> torch.Tensor:
        """Return [..., target_size] from spikes [..., source_size]."""
        current: torch.Tensor = self.synapses(spikes)
        return current

    def numbers(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that decide what it gives, the same before and after it is packed."""
        bias = getattr(packed_layer(self.synapses) or self.synapses, "bias", None)
        return (self.dense_weight(),) if bias is None else (self.dense_weight(), bias)

    @property
    def format(self) -> str | None:
        """Name of the synapses' 4-bit format, or None where they are float."""
        if isinstance(self.synapses, STELinear):
            return self.synapses.format
        packed = packed_layer(self.synapses)
        return None if packed is None else packed.weight.format

    def dense_weight(self) -> torch.Tensor:
        """Return the numbers that ``forward`` uses, [target_size, source_size], float, without gradients."""
        with torch.no_grad():
            if isinstance(self.synapses, STELinear):
                return self.synapses.quantised().clone()
            packed = packed_layer(self.synapses)
            if packed is None:
                return self.synapses.get_parameter("weight").detach().clone()  # an nn.Linear's
            return dequantize(packed.packed_weight())[:, : self.source_size]

    def for_run(self) -> Product:
        """Return ``forward`` for many steps in a row.

        Synapses that train in four bits are quantised once for all. Packed ones cost only the spikes that there are,
        as ``q4_snn.products.SpikeProduct``, where the source fires, and nothing records gradients.
        """
        if isinstance(self.synapses, STELinear):
            return functools.partial(nn.functional.linear, weight=self.synapses.quantised(), bias=self.synapses.bias)
        if self.is_binary and not torch.is_grad_enabled():
            return _event_product(self.synapses)
        return self


def packed_layer(synapses: nn.Module) -> Q4Linear | None:
    """Return the packed layer that synapses are, or hold with inputs filled up to whole blocks; None where none is."""
    inner = synapses.layer if isinstance(synapses, FilledLinear) else synapses
    return inner if isinstance(inner, Q4Linear) else None


def _event_product(synapses: nn.Module) -> Product:
    """Return the product of packed synapses with zeros and ones, at the cost of the ones; others as they are."""
    layer: Any = packed_layer(synapses)
    if layer is None or layer.dtype is not torch.float32:
        return synapses
    return EventProduct(layer, synapses.in_features)  # type: ignore[arg-type]  # those of x, before it is filled up


class EventProduct:
    """The product of packed synapses with zeros and ones, filled up to whole blocks; what is not 0 counts as 1."""

    def __init__(self, layer: Q4Linear, columns: int) -> None:
        self._product, self._name = SpikeProduct(layer), layer.name
        self._columns, self._missing = columns, layer.in_features - columns

    def _ones(self, spikes: torch.Tensor) -> torch.Tensor:
        if spikes.shape[-1:] != (self._columns,):
            rule = f"of shape [..., {self._columns}]"
            raise InputError(f"layer {self._name!r}", name="spikes", rule=rule, value=list(spikes.shape))
        missing, ones = self._missing, spikes.to(torch.bool)
        return nn.functional.pad(ones, (0, missing)) if missing else ones

    def __call__(self, spikes: torch.Tensor) -> torch.Tensor:
        """Return [..., n] from spikes [..., m]."""
        return self._product(self._ones(spikes))

    def ahead(self, spikes: torch.Tensor) -> Product:
        """Return what is called for each step of spikes [T, B, n]: few rows go some steps at a time, to equal bits."""
        parts = spikes.split(max(1, _ROWS_AHEAD // max(1, spikes.shape[1])))
        results = (current for part in parts for current in self._product.steps(self._ones(part)))
        return lambda _: next(results)
