"""Kinds of neurons: NIR's parameters, snnTorch's signatures, one step a call.

Time is discrete. With i the input current, each call is one forward Euler step of NIR's equation,
``tau_mem · dv/dt = v_leak - v + r · i``: ``v ← beta · v + (r · dt / tau_mem) · i + (dt / tau_mem) · v_leak`` with
``beta = 1 - dt / tau_mem``. A parameter is a number, or a tensor with one number for each neuron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_snn.neuron import Membrane, Spiking, gain_of, leaky_step, stated
from q4core import ConfigError

if TYPE_CHECKING:
    from q4_snn.neuron import Parameter, Reset
    from q4_snn.surrogate import Surrogate

__all__ = ["ALIF", "IF", "LI", "LIF", "CubaLIF"]


class LI(Membrane):
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
        super().__init__(dt, **stated(tau_mem=tau_mem, r=r, v_leak=v_leak))

    @classmethod
    def from_beta(cls, beta: float | nn.Parameter, *, dt: float = 1e-4) -> LI:
        """Return integrators by the share of a membrane that a step leaves, as of ``LIF``."""
        return cls(_tau("beta", beta, dt, cls), dt=dt).learn_share("tau_mem", beta)

    def forward(self, x: torch.Tensor, mem: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the membranes twice, as output and as state: [..., n] from currents [..., n]."""
        (mem,) = self._state(x, (mem,))
        mem = self._integrate(mem, x)
        return mem, mem


class LIF(Spiking, Membrane):
    """Leaky integrate-and-fire neuron; the same numbers as snnTorch's ``Leaky`` with the same ``reset_delay``.

    Args:
        tau_mem: Time constant in seconds, at least dt.
        r: Resistance; None for tau_mem / dt, so that one unit of current adds 1 in a step, as in snnTorch.
        v_leak: Where the membrane rests.
        v_threshold: Above it a neuron fires.
        v_reset: Where it goes then, with ``reset="value"``.
        t_refractory: Seconds that a neuron waits after a spike, to the nearest step, as NEST's ``t_ref``: for as many
            steps its membrane stays where the reset left it, its input is ignored, and it does not fire. It does not
            learn, and needs ``reset_delay=False``.
        dt: Seconds of a step.
        reset: ``subtract`` the threshold, set to the ``value`` v_reset, or ``none``.
        threshold_inclusive: Whether a membrane at exactly the threshold fires.
        reset_delay: Whether the reset waits for the next step, as snnTorch's default does.
        surrogate: Gradient of a spike. Defaults to ``atan()``.

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
        t_refractory: Parameter = 0.0,
        dt: float = 1e-4,
        reset: Reset = "subtract",
        threshold_inclusive: bool = False,
        reset_delay: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        values = stated(tau_mem=tau_mem, r=r, v_leak=v_leak, v_threshold=v_threshold, v_reset=v_reset)
        super().__init__(dt, reset, threshold_inclusive, reset_delay, surrogate, t_refractory, **values)

    @classmethod
    def from_beta(
        cls, beta: float | nn.Parameter, v_threshold: Parameter = 1.0, *, dt: float = 1e-4, **options: Any
    ) -> LIF:
        """Return neurons by the share of a membrane that a step leaves, 0 … below 1, as snnTorch's ``Leaky(beta)``.

        An ``nn.Parameter`` learns in place of the time constant, as with snnTorch's ``learn_beta``.
        """
        made = cls(_tau("beta", beta, dt, cls), None, 0.0, v_threshold, dt=dt, **options)
        return made.learn_share("tau_mem", beta)

    def forward(self, x: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return spikes and state, [..., n] each, from currents [..., n] and the state before, by ``states``."""
        mem, *waits = self._state(x, state)
        return self._fire(mem, waits, lambda before: self._integrate(before, x))


class CubaLIF(Spiking, Membrane):
    """Current-based LIF neuron: its synaptic current decays too; the same numbers as snnTorch's ``Synaptic``.

    Args:
        tau_mem: Time constant of the membrane in seconds, at least dt.
        tau_syn: Time constant of the synaptic current in seconds, at least dt.
        r: Resistance; None for tau_mem / dt.
        w_in: Weight of the input; None for tau_syn / dt, so that one unit of it adds 1 to the current in a step.
        reset: As of ``LIF``, as are all others; the membrane is reset, not the current.

    Raises:
        ConfigError: A parameter is not legal.
    """

    states = ("syn", "mem")
    tau_syn: Parameter
    w_in: Parameter

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
        t_refractory: Parameter = 0.0,
        dt: float = 1e-4,
        reset: Reset = "subtract",
        threshold_inclusive: bool = False,
        reset_delay: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        values = stated(
            tau_mem=tau_mem, tau_syn=tau_syn, r=r, v_leak=v_leak, v_threshold=v_threshold, v_reset=v_reset, w_in=w_in
        )
        super().__init__(dt, reset, threshold_inclusive, reset_delay, surrogate, t_refractory, **values)

    @classmethod
    def from_alpha_beta(
        cls,
        alpha: float | nn.Parameter,
        beta: float | nn.Parameter,
        v_threshold: Parameter = 1.0,
        *,
        dt: float = 1e-4,
        **options: Any,
    ) -> CubaLIF:
        """Return neurons by what a step leaves of current and membrane, as snnTorch's ``Synaptic(alpha, beta)``."""
        tau_mem, tau_syn = _tau("beta", beta, dt, cls), _tau("alpha", alpha, dt, cls)
        made = cls(tau_mem, tau_syn, None, 0.0, v_threshold, dt=dt, **options)
        return made.learn_share("tau_mem", beta).learn_share("tau_syn", alpha)

    @property
    def alpha(self) -> Parameter:
        """Share of a synaptic current that a step leaves: 1 - dt / tau_syn."""
        return self.share_of("tau_syn")

    @property
    def input_gain(self) -> Parameter:
        """What one unit of input adds to a current in a step: w_in · dt / tau_syn, or 1 where w_in is None."""
        return gain_of(self.dt, self.tau_syn, self.w_in) if "w_in" in self.parameter_names else 1.0

    def forward(self, x: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return spikes, currents, membranes and other state, [..., n] each, from input [..., n] and the state."""
        syn, mem, *waits = self._state(x, state)
        syn = leaky_step(syn, x, self.alpha, self.input_gain, 0.0)
        spikes, *after = self._fire(mem, waits, lambda before: self._integrate(before, syn))
        return spikes, syn, *after


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
        t_refractory: Parameter = 0.0,
        dt: float = 1e-4,
        reset: Reset = "subtract",
        threshold_inclusive: bool = False,
        reset_delay: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        values = stated(r=r, v_threshold=v_threshold, v_reset=v_reset)
        super().__init__(dt, reset, threshold_inclusive, reset_delay, surrogate, t_refractory, **values)

    def forward(self, x: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return spikes and state, [..., n] each, from currents [..., n] and the state before, by ``states``."""
        mem, *waits = self._state(x, state)
        return self._fire(mem, waits, lambda before: leaky_step(before, x, 1.0, self.gain, 0.0))

    @property
    def gain(self) -> Parameter:
        """The change by one unit of current in a step: r · dt, or 1 where r is None."""
        return gain_of(self.dt, 1.0, self.r) if "r" in self.parameter_names else 1.0


class ALIF(Spiking, Membrane):
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
        t_refractory: Parameter = 0.0,
        dt: float = 1e-4,
        reset: Reset = "subtract",
        threshold_inclusive: bool = False,
        surrogate: Surrogate | None = None,
    ) -> None:
        values = stated(
            tau_mem=tau_mem,
            tau_adapt=tau_adapt,
            adaptation=adaptation,
            r=r,
            v_leak=v_leak,
            v_threshold=v_threshold,
            v_reset=v_reset,
        )
        super().__init__(dt, reset, threshold_inclusive, False, surrogate, t_refractory, **values)  # noqa: FBT003  # no delay

    @property
    def rho(self) -> Parameter:
        """Share of the threshold's rise that a step leaves: 1 - dt / tau_adapt."""
        return self.share_of("tau_adapt")

    def forward(self, x: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return spikes, adaptations, membranes and other state, [..., n] each, from input [..., n] and the state.

        The threshold is v_threshold + adaptation · adapt.
        """
        adapt, mem, *waits = self._state(x, state)
        spikes, *after = self._fire(mem, waits, lambda before: self._integrate(before, x), self.adaptation * adapt)
        return spikes, self.rho * adapt + spikes, *after


def _tau(name: str, share: float | nn.Parameter, dt: float, neuron: type) -> Parameter:
    """Return the time constant of a share."""
    found = share.detach() if isinstance(share, nn.Parameter) else share
    is_one = isinstance(share, nn.Parameter) or (isinstance(share, (int, float)) and not isinstance(share, bool))
    if not is_one or not bool(((torch.as_tensor(found) >= 0) & (torch.as_tensor(found) < 1)).all()):
        rule = "a number from 0 to below 1, or an nn.Parameter of such, [n] or []"
        raise ConfigError(neuron.__name__, name=name, rule=rule, value=share)
    return dt / (1 - found)
