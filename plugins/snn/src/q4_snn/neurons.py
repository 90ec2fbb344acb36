"""Neurons: NIR's parameters, snnTorch's signatures, one step a call.

Time is discrete. With i the input current, each call is one forward Euler step of NIR's equation,
``tau_mem · dv/dt = v_leak - v + r · i``: ``v ← beta · v + (r · dt / tau_mem) · i + (dt / tau_mem) · v_leak`` with
``beta = 1 - dt / tau_mem``. A parameter is a number, or a tensor with one number for each neuron.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

import torch
from torch import nn

from q4_snn.surrogate import Surrogate, atan
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ALIF", "IF", "LI", "LIF", "CubaLIF", "Neuron", "Parameter", "Reset", "Spiking"]

Parameter = float | torch.Tensor
"""A number, or a float tensor [n] with one for each neuron, without gradients."""
Reset = Literal["subtract", "value", "none"]


class Neuron(nn.Module):
    """What all neurons share: parameters, state tensors, and how a neuron that fired is reset.

    Parameters are options as an epsilon is, not state: ``state_dict`` does not hold them, ``q4_snn.write_nir`` does.

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
            self._keep(name, value if isinstance(value, torch.Tensor) else self._number(name, value))
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
        """How many neurons the parameters are for; None where any number will do."""
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

    def _keep(self, name: str, value: Parameter) -> None:
        """Keep a number as it is, for every dtype, and a tensor as a buffer that moves with the module."""
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
        told = (f"{name}=[{len(v)}]" if isinstance(v, torch.Tensor) else f"{name}={v:g}" for name, v in values)
        return ", ".join([*told, f"dt={self.dt:g}"])


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
                mem = integrate(mem) - _times(self.v_threshold, fired.to(mem))
            else:
                mem = integrate(torch.where(fired, self.v_reset, mem))
            return self.surrogate(mem - threshold, inclusive=self.threshold_inclusive), mem
        mem = integrate(mem)
        spikes = self.surrogate(mem - threshold, inclusive=self.threshold_inclusive)
        if self.reset == "subtract":
            mem = mem - _times(self.v_threshold, spikes.detach())
        elif self.reset == "value":
            mem = torch.where(spikes.detach() > 0, self.v_reset, mem)
        return spikes, mem


def _decay(dt: float, tau: Parameter) -> Parameter:
    return 1 - dt / tau


def _gain(dt: float, tau: Parameter, r: Parameter | None) -> Parameter:
    """Return what one unit of current adds to a membrane in a step: exactly 1 where no resistance is given."""
    return 1.0 if r is None else r * dt / tau


def _times(factor: Parameter, x: torch.Tensor) -> torch.Tensor:
    """Return the product; a factor of 1 costs nothing."""
    return x if isinstance(factor, float) and factor == 1.0 else factor * x


def _leaky(mem: torch.Tensor, current: torch.Tensor, beta: Parameter, gain: Parameter, leak: Parameter) -> torch.Tensor:
    """Return the membranes after one Euler step; ones and zeros cost nothing."""
    mem = beta * mem + _times(gain, current)
    return mem if isinstance(leak, float) and leak == 0.0 else mem + (1 - beta) * leak


class _Membrane(Neuron):
    """What neurons with a leaky membrane derive from their parameters."""

    tau_mem: Parameter
    v_leak: Parameter

    @property
    def beta(self) -> Parameter:
        """Share of a membrane that a step leaves: 1 - dt / tau_mem."""
        return _decay(self.dt, self.tau_mem)

    @property
    def gain(self) -> Parameter:
        """What one unit of current adds in a step: r · dt / tau_mem, or 1 where r is None."""
        return _gain(self.dt, self.tau_mem, getattr(self, "r", None))

    def _integrate(self, mem: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        return _leaky(mem, current, self.beta, self.gain, self.v_leak)


def _given(**parameters: Parameter | None) -> dict[str, Parameter]:
    return {name: value for name, value in parameters.items() if value is not None}


class LI(_Membrane):
    """Leaky integrator: a membrane that never fires, such as a read-out.

    Args:
        tau_mem: Time constant in seconds, at least dt.
        r: Resistance; None for tau_mem / dt, so that one unit of current adds 1 in a step.
        v_leak: Where the membrane rests.
        dt: Seconds of a step.

    Raises:
        ConfigError: A parameter is not legal.
    """

    def __init__(
        self, tau_mem: Parameter, r: Parameter | None = None, v_leak: Parameter = 0.0, *, dt: float = 1e-4
    ) -> None:
        super().__init__(dt, **_given(tau_mem=tau_mem, r=r, v_leak=v_leak))

    def forward(self, x: torch.Tensor, mem: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the membranes twice, as output and as state: [..., n] from currents [..., n]."""
        (mem,) = self._state(x, (mem,))
        mem = self._integrate(mem, x)
        return mem, mem


class LIF(Spiking, _Membrane):
    """Leaky integrate-and-fire neuron; the same numbers as snnTorch's ``Leaky`` with ``reset_delay`` as told here.

    Args:
        tau_mem: Time constant in seconds, at least dt.
        r: Resistance; None for tau_mem / dt, so that one unit of current adds 1 in a step, as in snnTorch.
        v_leak: Where the membrane rests.
        v_threshold: Above it a neuron fires.
        v_reset: Where it goes then, with ``reset="value"``.
        dt: Seconds of a step.
        reset: ``subtract`` the threshold, set to the ``value`` v_reset, or ``none``.
        threshold_inclusive: Whether a membrane at exactly the threshold fires.
        reset_delay: Whether the reset waits for the next step, as snnTorch's default does.
        surrogate: Gradient of a spike; ``atan()`` unless told.

    Raises:
        ConfigError: A parameter is not legal.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        tau_mem: Parameter,
        r: Parameter | None = None,
        v_leak: Parameter = 0.0,
        v_threshold: Parameter = 1.0,
        v_reset: Parameter = 0.0,
        *,
        dt: float = 1e-4,
        reset: Reset = "subtract",
        threshold_inclusive: bool = False,
        reset_delay: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        values = _given(tau_mem=tau_mem, r=r, v_leak=v_leak, v_threshold=v_threshold, v_reset=v_reset)
        super().__init__(dt, reset, threshold_inclusive, reset_delay, surrogate, **values)

    @classmethod
    def from_beta(cls, beta: float, v_threshold: Parameter = 1.0, *, dt: float = 1e-4, **options: Any) -> LIF:
        """Return neurons by the share of a membrane that a step leaves, 0 … below 1, as snnTorch's ``Leaky(beta)``."""
        return cls(_tau("beta", beta, dt, cls), None, 0.0, v_threshold, dt=dt, **options)

    def forward(self, x: torch.Tensor, mem: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (spikes, membranes), [..., n] each, from currents [..., n] and the membranes before."""
        (mem,) = self._state(x, (mem,))
        return self._fire(mem, lambda before: self._integrate(before, x))


class CubaLIF(Spiking, _Membrane):
    """Current-based LIF neuron: its synaptic current decays too; the same numbers as snnTorch's ``Synaptic``.

    Args:
        tau_mem: Time constant of the membrane in seconds, at least dt.
        tau_syn: Time constant of the synaptic current in seconds, at least dt.
        r: Resistance; None for tau_mem / dt.
        w_in: Weight of what comes in; None for tau_syn / dt, so that one unit of it adds 1 to the current in a step.
        reset: As of ``LIF``, as are all others; the membrane is reset, not the current.

    Raises:
        ConfigError: A parameter is not legal.
    """

    states = ("syn", "mem")
    tau_syn: Parameter

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        tau_mem: Parameter,
        tau_syn: Parameter,
        r: Parameter | None = None,
        v_leak: Parameter = 0.0,
        v_threshold: Parameter = 1.0,
        v_reset: Parameter = 0.0,
        w_in: Parameter | None = None,
        *,
        dt: float = 1e-4,
        reset: Reset = "subtract",
        threshold_inclusive: bool = False,
        reset_delay: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        values = _given(
            tau_mem=tau_mem, tau_syn=tau_syn, r=r, v_leak=v_leak, v_threshold=v_threshold, v_reset=v_reset, w_in=w_in
        )
        super().__init__(dt, reset, threshold_inclusive, reset_delay, surrogate, **values)

    @classmethod
    def from_alpha_beta(
        cls, alpha: float, beta: float, v_threshold: Parameter = 1.0, *, dt: float = 1e-4, **options: Any
    ) -> CubaLIF:
        """Return neurons by what a step leaves of current and membrane, as snnTorch's ``Synaptic(alpha, beta)``."""
        tau_mem, tau_syn = _tau("beta", beta, dt, cls), _tau("alpha", alpha, dt, cls)
        return cls(tau_mem, tau_syn, None, 0.0, v_threshold, dt=dt, **options)

    @property
    def alpha(self) -> Parameter:
        """Share of a synaptic current that a step leaves: 1 - dt / tau_syn."""
        return _decay(self.dt, self.tau_syn)

    def forward(
        self, x: torch.Tensor, syn: torch.Tensor | None = None, mem: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (spikes, currents, membranes), [..., n] each, from input [..., n] and the state before."""
        syn, mem = self._state(x, (syn, mem))
        syn = _leaky(syn, x, self.alpha, _gain(self.dt, self.tau_syn, getattr(self, "w_in", None)), 0.0)
        spikes, mem = self._fire(mem, lambda before: self._integrate(before, syn))
        return spikes, syn, mem


class IF(Spiking):
    """Integrate-and-fire neuron: ``dv/dt = r · i``, without a leak.

    Args:
        r: Resistance; None for 1 / dt, so that one unit of current adds 1 in a step. All others: as of ``LIF``.

    Raises:
        ConfigError: A parameter is not legal.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        r: Parameter | None = None,
        v_threshold: Parameter = 1.0,
        v_reset: Parameter = 0.0,
        *,
        dt: float = 1e-4,
        reset: Reset = "subtract",
        threshold_inclusive: bool = False,
        reset_delay: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        values = _given(r=r, v_threshold=v_threshold, v_reset=v_reset)
        super().__init__(dt, reset, threshold_inclusive, reset_delay, surrogate, **values)

    def forward(self, x: torch.Tensor, mem: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (spikes, membranes), [..., n] each, from currents [..., n] and the membranes before."""
        (mem,) = self._state(x, (mem,))
        gain = _gain(self.dt, 1.0, getattr(self, "r", None))
        return self._fire(mem, lambda before: _leaky(before, x, 1.0, gain, 0.0))


class ALIF(Spiking, _Membrane):
    """Adaptive LIF neuron: each spike raises the threshold by ``adaptation``, which decays with ``tau_adapt``.

    Args:
        tau_mem: As of ``LIF``.
        tau_adapt: Time constant of the threshold's rise in seconds, at least dt.
        adaptation: By how much a spike raises the threshold.
        v_threshold: Where the threshold is without spikes; a reset subtracts this much. All others: as of ``LIF``.

    Raises:
        ConfigError: A parameter is not legal.

    Reference:
        Bellec et al., A solution to the learning dilemma for recurrent networks of spiking neurons, 2020.
    """

    states = ("adapt", "mem")
    tau_adapt: Parameter
    adaptation: Parameter

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        tau_mem: Parameter,
        tau_adapt: Parameter,
        adaptation: Parameter,
        r: Parameter | None = None,
        v_leak: Parameter = 0.0,
        v_threshold: Parameter = 1.0,
        v_reset: Parameter = 0.0,
        *,
        dt: float = 1e-4,
        reset: Reset = "subtract",
        threshold_inclusive: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        values = _given(
            tau_mem=tau_mem,
            tau_adapt=tau_adapt,
            adaptation=adaptation,
            r=r,
            v_leak=v_leak,
            v_threshold=v_threshold,
            v_reset=v_reset,
        )
        super().__init__(dt, reset, threshold_inclusive, False, surrogate, **values)  # noqa: FBT003  # no delay

    @property
    def rho(self) -> Parameter:
        """Share of the threshold's rise that a step leaves: 1 - dt / tau_adapt."""
        return _decay(self.dt, self.tau_adapt)

    def forward(
        self, x: torch.Tensor, adapt: torch.Tensor | None = None, mem: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (spikes, adaptations, membranes), [..., n] each; the threshold is v_threshold + adaptation · adapt."""
        adapt, mem = self._state(x, (adapt, mem))
        spikes, mem = self._fire(mem, lambda before: self._integrate(before, x), self.adaptation * adapt)
        return spikes, self.rho * adapt + spikes, mem


def _tau(name: str, share: float, dt: float, neuron: type) -> float:
    if not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise ConfigError(neuron.__name__, name=name, rule="a number from 0 to below 1", value=share)
    return dt / (1 - share)
