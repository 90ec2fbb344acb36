"""Neurons of two variables whose membranes are not linear: AdEx and Izhikevich's, by forward Euler steps.

Both variables step from the values before; then who is above the threshold fires, and is reset. Voltages are in mV,
currents in nA, resistances in MΩ and conductances in µS by the defaults; time is in seconds, as everywhere here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_snn.neuron import Spiking, at_least, scaled
from q4core import ConfigError

if TYPE_CHECKING:
    from q4_snn.neuron import Parameter
    from q4_snn.surrogate import Surrogate

__all__ = ["AdEx", "Izhikevich"]

_MS_PER_S = 1000.0
_LARGEST_EXPONENT = 80.0
"""exp of it is a float32, and so is a few thousand times as much."""


class AdEx(Spiking):
    """Adaptive exponential integrate-and-fire neuron.

    With the adaptation w, in the unit of the current i::

        tau_mem · dv/dt = v_leak - v + delta_t · exp((v - v_rheobase) / delta_t) + r · (i - w)
        tau_adapt · dw/dt = a · (v - v_leak) - w

    Above v_threshold v becomes v_reset, and w becomes w + b. The exponential has v_threshold where v is above it. Its
    state is ``adapt``, which is w, and ``mem``.

    Args:
        tau_mem: Time constant of the membrane in seconds, at least dt: capacitance by leak conductance.
        tau_adapt: Of the adaptation.
        r: Resistance: 1 / leak conductance.
        a: How the adaptation follows the membrane, a conductance.
        b: What a spike adds to it, a current.
        delta_t: Slope of the exponential, above 0.
        v_leak: Where the membrane rests without the exponential.
        v_rheobase: Where the exponential's slope is 1, V_T.
        v_threshold: Where a spike is cut off, and counted.
        v_reset: Where the membrane goes then.
        t_refractory: As of ``LIF``; the adaptation goes on.
        dt: Seconds of a step.
        threshold_inclusive: Whether a membrane at exactly the threshold fires.
        surrogate: Gradient of a spike, in the unit of the membrane. Defaults to ``atan()``.

    Raises:
        ConfigError: A parameter is not legal, or the exponential at the threshold is no float32.

    Reference:
        Brette and Gerstner, Adaptive exponential integrate-and-fire model as an effective description of neuronal
        activity, 2005, equations 1 to 3; defaults are its table 1.
    """

    states = ("adapt", "mem")
    tau_mem: Parameter
    tau_adapt: Parameter
    r: Parameter
    a: Parameter
    b: Parameter
    delta_t: Parameter
    v_leak: Parameter
    v_rheobase: Parameter

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        tau_mem: Parameter = 281e-3 / 30,
        tau_adapt: Parameter = 144e-3,
        r: Parameter = 1000 / 30,
        a: Parameter = 0.004,
        b: Parameter = 0.0805,
        delta_t: Parameter = 2.0,
        v_leak: Parameter = -70.6,
        v_rheobase: Parameter = -50.4,
        v_threshold: Parameter = 20.0,
        v_reset: Parameter = -70.6,
        *,
        t_refractory: Parameter = 0.0,
        dt: float = 1e-4,
        threshold_inclusive: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            dt, "value", threshold_inclusive, False, surrogate, t_refractory,  # noqa: FBT003  # no delay
            tau_mem=tau_mem, tau_adapt=tau_adapt, r=r, a=a, b=b, delta_t=delta_t, v_leak=v_leak, v_rheobase=v_rheobase,
            v_threshold=v_threshold, v_reset=v_reset,
        )  # fmt: skip
        self._require("delta_t", "above 0", lambda value: value > 0)
        distance = torch.as_tensor(v_threshold).detach() - torch.as_tensor(v_rheobase).detach()
        if bool((distance > _LARGEST_EXPONENT * torch.as_tensor(delta_t).detach()).any()):
            rule = f"at most {_LARGEST_EXPONENT:g} · delta_t above v_rheobase, so that the exponential is a float32"
            raise ConfigError(self._what, name="v_threshold", rule=rule, value=v_threshold)

    def forward(self, x: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return spikes, adaptations, membranes and other state, [..., n] each, from currents and the state before."""
        adapt, mem, *waits = self._state(x, state)
        leak, slope = self.v_leak, self.delta_t
        rising = slope * torch.exp((torch.clamp(mem, max=self.v_threshold) - self.v_rheobase) / slope)

        def integrate(before: torch.Tensor) -> torch.Tensor:
            drive = leak - before + rising + self.r * (x - adapt)
            return before + self.dt / at_least(self.dt, self.tau_mem) * drive

        spikes, *after = self._fire(mem, waits, integrate)
        followed = self.dt / at_least(self.dt, self.tau_adapt) * (self.a * (mem - leak) - adapt)
        return spikes, adapt + followed + self.b * spikes, *after


class Izhikevich(Spiking):
    """Izhikevich's neuron, whose parameters are those of the paper.

    In ms and mV, with the recovery u::

        dv/dt = 0.04 v² + 5 v + 140 - u + i
        du/dt = a (b v - u)

    At v_threshold v becomes c, and u becomes u + d. Its state is ``recovery``, which is u, and ``mem``; it begins at
    v = -65 and u = b v.

    Args:
        a: Rate of the recovery, 1 / ms.
        b: How the recovery follows the membrane.
        c: Where the membrane goes after a spike.
        d: What a spike adds to the recovery.
        v_threshold: Where a spike is cut off, and counted.
        dt: Seconds of a step; at most 1e-3.
        threshold_inclusive: Whether a membrane at exactly the threshold fires, as in the paper.
        surrogate: Gradient of a spike, in mV. Defaults to ``atan()``.

    Raises:
        ConfigError: A parameter is not legal, or the step is longer than a millisecond.

    Reference:
        Izhikevich, Simple model of spiking neurons, 2003, equations 1 to 3. Its program takes two half steps for v in
        each millisecond; these are whole ones, as NEST's ``consistent_integration``.
    """

    states = ("recovery", "mem")
    a: Parameter
    b: Parameter
    d: Parameter

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        a: Parameter = 0.02,
        b: Parameter = 0.2,
        c: Parameter = -65.0,
        d: Parameter = 8.0,
        v_threshold: Parameter = 30.0,
        *,
        dt: float = 1e-4,
        threshold_inclusive: bool = True,
        surrogate: Surrogate | None = None,
    ) -> None:
        super().__init__(
            dt, "value", threshold_inclusive, False, surrogate, 0.0,  # noqa: FBT003  # no delay
            a=a, b=b, v_reset=c, d=d, v_threshold=v_threshold,
        )  # fmt: skip
        self._require("dt", "1e-3 seconds at most", lambda value: value <= 1e-3 * (1 + 1e-6))

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step."""
        return self.dt * _MS_PER_S

    def rest(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the state that the paper begins with, of the shape and dtype of x."""
        mem = torch.full_like(x, -65.0)
        return scaled(self.b, mem), mem

    def forward(self, x: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return spikes, recoveries and membranes, [..., n] each, from currents and the state before."""
        recovery, mem = self._state(x, state)
        step = self.step_ms
        spikes, after = self._fire(mem, (), lambda v: v + step * ((0.04 * v + 5.0) * v + 140.0 - recovery + x))
        followed = (self.b * mem - recovery) * (step * self.a)
        return spikes, recovery + followed + self.d * spikes, after
