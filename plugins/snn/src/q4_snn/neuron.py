"""The base of neurons: parameters, state tensors, thresholds and resets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

import torch
from torch import nn

from q4_snn.surrogate import Surrogate, atan
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Membrane", "Neuron", "Parameter", "Reset", "Spiking", "decay_of", "gain_of", "leaky_step", "stated"]

Parameter = float | torch.Tensor
"""A number, or a float tensor [n] with one for each neuron, without gradients."""
Reset = Literal["subtract", "value", "none"]


class Neuron(nn.Module):
    """The base of all neurons: parameters and state tensors.

    Parameters are options, not state: ``state_dict`` does not hold them, ``q4_snn.write_nir`` does.

    Args:
        dt: Seconds of a step.
        **parameters: By NIR's names.

    Raises:
        ConfigError: A parameter is not legal or wants gradients, or parameters have several sizes.
    """

    states: ClassVar[tuple[str, ...]] = ("mem",)
    """Names of the state tensors, in the order in which ``forward`` takes and returns them."""
    dt: float

    def __init__(self, dt: float, **parameters: Parameter) -> None:
        super().__init__()
        self.dt = self._number("dt", dt)
        self.parameter_names = (*parameters,)
        for name, value in parameters.items():
            if isinstance(value, torch.Tensor) and (value.requires_grad or isinstance(value, nn.Parameter)):
                hint = f"Neurons' parameters don't learn: give {name}.detach(), and train the synapses."
                rule = "a number, or a tensor [n] without gradients"
                raise ConfigError(self._what, name=name, rule=rule, value=f"a {type(value).__name__}", hint=hint)
            self._set(name, value if isinstance(value, torch.Tensor) else self._number(name, value))
        self._require("dt", "above 0 seconds", lambda value: value > 0)
        least, rule = self.dt * (1 - 1e-6), f"dt ({self.dt:g} s) or more: a step must not overshoot"
        self._size: int | None = None
        for name in parameters:
            if name.startswith("tau_"):
                self._require(name, rule, lambda value: value >= least)
            else:
                self._require(name, "finite", torch.isfinite)
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                if value.dim() != 1 or self._size not in {None, len(value)}:
                    rule = "numbers, or tensors [n] of one n"
                    raise ConfigError(self._what, name=name, rule=rule, value=list(value.shape))
                self._size = len(value)

    @property
    def _what(self) -> str:
        return type(self).__name__

    @property
    def size(self) -> int | None:
        """The number of neurons that the parameters are for; None for any number."""
        return self._size

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(self._what, name=name, rule="a finite number, or a tensor [n]", value=value)
        return float(value)

    def _require(self, name: str, rule: str, holds: Callable[[torch.Tensor], torch.Tensor]) -> None:
        value = getattr(self, name)
        found = torch.as_tensor(value, dtype=torch.float64)
        if not bool((torch.isfinite(found) & holds(found)).all()):
            raise ConfigError(self._what, name=name, rule=rule, value=value)

    def _set(self, name: str, value: Parameter) -> None:
        """Store a number as it is, for every dtype, and a tensor as a buffer that moves with the module."""
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                setattr(self, name, float(value))
            else:
                self.register_buffer(name, value.detach().to(torch.get_default_dtype()), persistent=False)
        else:
            setattr(self, name, value)

    def rest(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the state of neurons at rest, of the shape and dtype of x."""
        leak = getattr(self, "v_leak", 0.0)
        return (*(torch.zeros_like(x) for _ in self.states[:-1]), torch.zeros_like(x) + leak)

    def _state(self, x: torch.Tensor, given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
        """Return the state to step from: what is given, or rest."""
        if self._size is not None and (x.dim() == 0 or x.shape[-1] != self._size):
            raise InputError(self._what, name="x", rule=f"of shape [..., {self._size}]", value=list(x.shape))
        if given[0] is None and all(item is None for item in given):
            return self.rest(x)
        for name, item in zip(self.states, given, strict=True):
            if item is None or item.shape != x.shape:
                value = None if item is None else list(item.shape)
                raise InputError(self._what, name=name, rule=f"of the shape of x, {list(x.shape)}", value=value)
        return cast("tuple[torch.Tensor, ...]", given)

    def extra_repr(self) -> str:
        """Return what torch prints."""
        values = ((name, getattr(self, name)) for name in self.parameter_names)
        shown = (f"{name}=[{len(v)}]" if isinstance(v, torch.Tensor) else f"{name}={v:g}" for name, v in values)
        return ", ".join([*shown, f"dt={self.dt:g}"])


class Spiking(Neuron):
    """A neuron with a threshold, which gives zeros and ones."""

    v_threshold: Parameter
    v_reset: Parameter

    def __init__(
        self,
        dt: float,
        reset: Reset,
        threshold_inclusive: bool,  # noqa: FBT001  # private
        reset_delay: bool,  # noqa: FBT001  # private
        surrogate: Surrogate | None,
        **parameters: Parameter,
    ) -> None:
        super().__init__(dt, **parameters)
        if reset not in get_args(Reset):
            raise ConfigError(self._what, name="reset", rule=f"one of {', '.join(get_args(Reset))}", value=reset)
        self.reset: Reset = reset
        self.threshold_inclusive = threshold_inclusive
        self.reset_delay = reset_delay
        self.surrogate = atan() if surrogate is None else surrogate

    def _fire(
        self, mem: torch.Tensor, integrate: Callable[[torch.Tensor], torch.Tensor], rise: torch.Tensor | float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return spikes and membranes after a step of ``integrate``, resets included; they carry no gradient."""
        threshold = self.v_threshold + rise
        if self.reset_delay and self.reset != "none":  # who was above the threshold is reset as this step begins
            before = mem.detach()
            fired = before >= threshold if self.threshold_inclusive else before > threshold
            if self.reset == "subtract":
                mem = integrate(mem) - scaled(self.v_threshold, fired.to(mem))
            else:
                mem = integrate(torch.where(fired, self.v_reset, mem))
            return self.surrogate(mem - threshold, inclusive=self.threshold_inclusive), mem
        mem = integrate(mem)
        spikes = self.surrogate(mem - threshold, inclusive=self.threshold_inclusive)
        if self.reset == "subtract":
            mem = mem - scaled(self.v_threshold, spikes.detach())
        elif self.reset == "value":
            mem = torch.where(spikes.detach() > 0, self.v_reset, mem)
        return spikes, mem


def decay_of(dt: float, tau: Parameter) -> Parameter:
    """Return the share that a step leaves of what decays with a time constant."""
    return 1 - dt / tau


def gain_of(dt: float, tau: Parameter, r: Parameter | None) -> Parameter:
    """Return what one unit of current adds to a membrane in a step: exactly 1 where no resistance is given."""
    return 1.0 if r is None else r * dt / tau


def scaled(factor: Parameter, x: torch.Tensor) -> torch.Tensor:
    """Return the product; a factor of 1 costs nothing."""
    return x if isinstance(factor, float) and factor == 1.0 else factor * x


def leaky_step(
    mem: torch.Tensor, current: torch.Tensor, beta: Parameter, gain: Parameter, leak: Parameter
) -> torch.Tensor:
    """Return the membranes after one Euler step; ones and zeros cost nothing."""
    mem = beta * mem + scaled(gain, current)
    return mem if isinstance(leak, float) and leak == 0.0 else mem + (1 - beta) * leak


class Membrane(Neuron):
    """The base of neurons with a leaky membrane."""

    tau_mem: Parameter
    v_leak: Parameter

    @property
    def beta(self) -> Parameter:
        """Share of a membrane that a step leaves: 1 - dt / tau_mem."""
        return decay_of(self.dt, self.tau_mem)

    @property
    def gain(self) -> Parameter:
        """The change by one unit of current in a step: r · dt / tau_mem, or 1 where r is None."""
        return gain_of(self.dt, self.tau_mem, getattr(self, "r", None))

    def _integrate(self, mem: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        return leaky_step(mem, current, self.beta, self.gain, self.v_leak)


def stated(**parameters: Parameter | None) -> dict[str, Parameter]:
    """Return the parameters that are not None."""
    return {name: value for name, value in parameters.items() if value is not None}
