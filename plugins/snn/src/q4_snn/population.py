"""Populations: a number of neurons of one kind, under a name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from q4_snn.neuron import Spiking
from q4core import ConfigError, Q4Error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4_snn.neuron import Neuron

__all__ = ["NonFiniteStateError", "Population", "check_name"]


class NonFiniteStateError(Q4Error, ArithmeticError, code="non_finite_state"):
    """A membrane, or another state of a population, is NaN or infinite; the network's call has changed nothing."""


class Population(nn.Module):
    """A number of neurons of one kind under a name; without a neuron it is an input of the network.

    Args:
        name: Unlike every other in a network, without dots and slashes, and no attribute of ``nn.ModuleDict``.
        size: How many neurons.
        neuron: How they compute; None for an input.
        spikes: Whether an input gives zeros and ones alone, so that packed synapses may run by its spikes.

    Raises:
        ConfigError: The name or size is not legal, or the neuron's parameters are for another size.
    """

    def __init__(self, name: str, size: int, neuron: Neuron | None = None, *, spikes: bool = False) -> None:
        super().__init__()
        check_name("population", name, "./")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"population {name!r}", name="size", rule="a positive whole number", value=size)
        if neuron is not None and neuron.size not in {None, size}:
            rule = f"one whose parameters are for {size} neurons"
            raise ConfigError(f"population {name!r}", name="neuron", rule=rule, value=f"for {neuron.size}")
        self.name = name
        self.size = size
        self.neuron = neuron
        self.is_binary = spikes if neuron is None else isinstance(neuron, Spiking)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, ...] = ()) -> tuple[torch.Tensor, ...]:
        """Return what the neurons give, then their state, from their input [..., size] and the state before."""
        neuron = self.neuron
        found: tuple[torch.Tensor, ...] = (x,) if neuron is None else neuron(x, *state)
        return found

    def check_finite(self, state: Iterable[torch.Tensor], *, step: int) -> None:
        """Raise a ``NonFiniteStateError`` if a state [B, n] is NaN or infinite after a step, counted from 0."""
        for kind, value in zip(() if self.neuron is None else self.neuron.states, state, strict=True):
            if not math.isfinite(float(value.detach().sum())) and not bool(torch.isfinite(value).all()):
                bad = (~torch.isfinite(value)).any(0).sum()
                raise NonFiniteStateError(
                    f"population {self.name!r}",
                    name=kind,
                    rule="finite",
                    value=f"NaN or infinity in {int(bad)} of {value.shape[-1]} neurons after step {step}",
                    hint="Look at the input, and at the weights of the projections into it.",
                )


def check_name(what: str, name: str, without: str) -> None:
    """Raise a ``ConfigError`` for what can't be the name of a module of torch's."""
    if not isinstance(name, str) or not name or {*without} & {*name}:
        raise ConfigError(what, name="name", rule=f"a word without {' and '.join(without)}", value=name)
    if hasattr(nn.ModuleDict(), name):
        rule = "none that torch's nn.ModuleDict has for something of its own"
        raise ConfigError(what, name="name", rule=rule, value=name, hint=f"Call it {name}_0, for example.")
