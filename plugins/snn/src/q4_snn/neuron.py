"""The base of neurons: parameters, state tensors, thresholds and resets."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

import torch
from torch import nn

from q4_snn.surrogate import Surrogate, atan
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

__all__ = ["Membrane", "Neuron", "Parameter", "Reset", "Spiking", "decay_of", "gain_of", "leaky_step", "stated"]

Parameter = float | torch.Tensor
"""A number, or a float tensor [n] with one for each neuron; as an ``nn.Parameter``, [n] or [], it learns."""
Reset = Literal["subtract", "value", "none"]
_SHARE = "share_of_"


class Neuron(nn.Module):
    """The base of all neurons: parameters and state tensors.

    A parameter that is an ``nn.Parameter`` learns, and is in ``state_dict``. All others are options, not state:
    ``state_dict`` does not hold them, ``q4_snn.write_nir`` does. A time constant that learns counts as dt where it
    falls below dt.

    Args:
        dt: Seconds of a step.
        **parameters: By NIR's names.

    Raises:
        ConfigError: A parameter is not legal, or is a tensor with gradients but no ``nn.Parameter``; or parameters have
            several sizes.
    """

    states: tuple[str, ...] = ("mem",)
    """Names of the state tensors, in the order in which ``forward`` takes and returns them."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Names of parameters that can't learn."""
    dt: float

    def __init__(self, dt: float, **parameters: Parameter) -> None:
        super().__init__()
        self.dt = self._number("dt", dt)
        self.parameter_names = (*parameters,)
        for name, value in parameters.items():
            self._check_gradients(name, value)
            self._set(name, value if isinstance(value, torch.Tensor) else self._number(name, value))
        self._require("dt", "above 0 seconds", lambda value: value > 0)
        least, rule = self.dt * (1 - 1e-6), f"dt ({self.dt:g} s) or more: a step must not overshoot"
        self._size: int | None = None
        for name in parameters:
            if name.startswith("tau_"):
                self._require(name, rule, lambda value: value >= least)
            else:
                self._require(name, "finite", torch.isfinite)
            self._fit(name, getattr(self, name))

    @property
    def _what(self) -> str:
        return type(self).__name__

    @property
    def size(self) -> int | None:
        """The number of neurons that the parameters are for; None for any number."""
        return self._size

    def _check_gradients(self, name: str, value: Any) -> None:
        """Refuse a tensor whose gradients would get lost, or mean nothing."""
        is_learned = isinstance(value, nn.Parameter)
        if isinstance(value, torch.Tensor) and (name in self.fixed if is_learned else value.requires_grad):
            found = "an nn.Parameter" if is_learned else "a tensor with gradients"
            learns = "" if name in self.fixed else ", or an nn.Parameter"
            rule = f"a number, or a tensor [n] without gradients{learns}"
            raise ConfigError(self._what, name=name, rule=rule, value=found, hint=f"Give {name}.detach(){learns}.")

    def _fit(self, name: str, value: Parameter) -> None:
        """Learn from a parameter for how many neurons it is, or refuse it."""
        if isinstance(value, torch.Tensor) and value.dim():
            if value.dim() != 1 or self._size not in {None, len(value)}:
                rule = "numbers, or tensors [n] of one n"
                raise ConfigError(self._what, name=name, rule=rule, value=list(value.shape))
            self._size = len(value)

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(self._what, name=name, rule="a finite number, or a tensor [n]", value=value)
        return float(value)

    def _require(self, name: str, rule: str, holds: Callable[[torch.Tensor], torch.Tensor]) -> None:
        value = getattr(self, name)
        found = torch.as_tensor(value, dtype=torch.float64).detach()
        if not bool((torch.isfinite(found) & holds(found)).all()):
            raise ConfigError(self._what, name=name, rule=rule, value=value)

    def _set(self, name: str, value: Parameter) -> None:
        """Store a number as it is, for every dtype, and a tensor so that it moves with the module."""
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        elif isinstance(value, torch.Tensor):
            if value.dim() == 0:
                setattr(self, name, float(value))
            else:
                self.register_buffer(name, value.detach().to(torch.get_default_dtype()), persistent=False)
        else:
            setattr(self, name, value)

    def share_of(self, tau: str) -> Parameter:
        """Return what a step leaves of what decays with a time constant: 1 - dt / tau, or the share that learns."""
        share = self._parameters.get(_SHARE + tau) if self._parameters else None
        return decay_of(self.dt, getattr(self, tau)) if share is None else share.clamp(0, 1)

    def learn_share(self, tau: str, share: float | nn.Parameter) -> Self:
        """Let a share learn in place of its time constant, clipped to 0 … 1 as snnTorch's; return the neuron."""
        if isinstance(share, nn.Parameter):
            delattr(self, tau)
            self.register_parameter(_SHARE + tau, share)
        return self

    def __getattr__(self, name: str) -> Any:
        """Return torch's tensors; and the time constant whose share learns, of what the share is now."""
        share = self.__dict__.get("_parameters", {}).get(_SHARE + name)
        return super().__getattr__(name) if share is None else self.dt / (1 - share.clamp(0, 1))

    def rest(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the state of neurons at rest, of the shape and dtype of x."""
        leak = getattr(self, "v_leak", 0.0)
        return tuple(torch.zeros_like(x) + leak if name == "mem" else torch.zeros_like(x) for name in self.states)

    def _state(self, x: torch.Tensor, given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
        """Return the state to step from: what is given, or rest."""
        if self._size is not None and (x.dim() == 0 or x.shape[-1] != self._size):
            raise InputError(self._what, name="x", rule=f"of shape [..., {self._size}]", value=list(x.shape))
        shape, fit = x.shape, len(given) == len(self.states)
        for item in given:
            fit = fit and item is not None and item.shape == shape
        return cast("tuple[torch.Tensor, ...]", given) if fit else self._rest(x, given)

    def _rest(self, x: torch.Tensor, given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
        """Return rest where no state is given; refuse one of another form."""
        if all(item is None for item in given):
            return self.rest(x)
        if len(given) > len(self.states):
            rule = f"the {len(self.states)} tensors of {', '.join(self.states)}"
            raise InputError(self._what, name="state", rule=rule, value=f"{len(given)} tensors")
        pairs = itertools.zip_longest(self.states, given)
        name, item = next((name, item) for name, item in pairs if item is None or item.shape != x.shape)
        value = None if item is None else list(item.shape)
        raise InputError(self._what, name=name, rule=f"of the shape of x, {list(x.shape)}", value=value)

    def extra_repr(self) -> str:
        """Return what torch prints."""
        values = ((name, getattr(self, name)) for name in self.parameter_names)
        shown = (f"{name}=[{len(v)}]" if isinstance(v, torch.Tensor) else f"{name}={v:g}" for name, v in values)
        return ", ".join([*shown, f"dt={self.dt:g}"])


class Spiking(Neuron):
    """A neuron with a threshold, which gives zeros and ones.

    With a refractory time it has one more state, ``refractory``: how many steps it waits, a whole number in the dtype
    of the membranes. For as many steps after a spike its membrane stays where the reset left it, its input is ignored,
    and it does not fire; synaptic currents and adaptation go on.
    """

    fixed = ("t_refractory",)
    v_threshold: Parameter
    v_reset: Parameter
    _steps: Parameter

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        dt: float,
        reset: Reset,
        threshold_inclusive: bool,  # noqa: FBT001  # private
        reset_delay: bool,  # noqa: FBT001  # private
        surrogate: Surrogate | None,
        t_refractory: Parameter,
        **parameters: Parameter,
    ) -> None:
        waits = isinstance(t_refractory, torch.Tensor) or t_refractory != 0
        super().__init__(dt, **parameters, **({"t_refractory": t_refractory} if waits else {}))
        if reset not in get_args(Reset):
            raise ConfigError(self._what, name="reset", rule=f"one of {', '.join(get_args(Reset))}", value=reset)
        if isinstance(self.v_reset, nn.Parameter) and reset != "value":
            rule = "no nn.Parameter where it is not used; reset='value' uses it"
            raise ConfigError(self._what, name="v_reset", rule=rule, value=f"one, and reset={reset!r}")
        self.reset: Reset = reset
        self.threshold_inclusive = threshold_inclusive
        self.reset_delay = reset_delay
        self.surrogate = atan() if surrogate is None else surrogate
        if waits:
            self._wait()

    def _wait(self) -> None:
        """Take the refractory time in steps."""
        self._require("t_refractory", "0 seconds or more", lambda value: value >= 0)
        time = torch.as_tensor(self.t_refractory, dtype=torch.float64)
        steps = (time / self.dt).round()
        if bool(((time > 0) & (steps < 1)).any()):
            rule = f"0, or half a step ({self.dt / 2:g} s) or more"
            raise ConfigError(self._what, name="t_refractory", rule=rule, value=self.t_refractory)
        if self.reset_delay:
            hint = "Give reset_delay=False: a membrane waits where its reset left it."
            raise ConfigError(self._what, name="reset_delay", rule="False with t_refractory", value=True, hint=hint)
        self._most = int(steps.max())
        if self._most:
            self.states = (*self.states, "refractory")
            self._set("_steps", steps)

    @property
    def refractory_steps(self) -> Parameter:
        """Steps that a neuron waits after a spike: t_refractory / dt, to the nearest whole number; 0 without one."""
        return self._steps if self.states[-1] == "refractory" else 0.0

    def _state(self, x: torch.Tensor, given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
        if self.states[-1] == "refractory" and self._most > (most := int(2 / torch.finfo(x.dtype).eps)):
            rule = f"of a dtype that counts {self._most} refractory steps; this one counts {most}"
            raise InputError(self._what, name="x", rule=rule, value=x.dtype)
        return super()._state(x, given)

    def _fire(
        self,
        mem: torch.Tensor,
        waits: Sequence[torch.Tensor],
        integrate: Callable[[torch.Tensor], torch.Tensor],
        rise: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return spikes, membranes and ``waits`` after a step of ``integrate``, resets included.

        A reset and the steps to wait carry no gradient.
        """
        threshold = self.v_threshold if rise is None else self.v_threshold + rise
        if self.reset_delay and self.reset != "none":  # who was above the threshold is reset as this step begins
            before = mem.detach()
            fired = before >= threshold if self.threshold_inclusive else before > threshold
            if self.reset == "subtract":
                mem = integrate(mem) - scaled(self.v_threshold, fired.to(mem))
            else:
                mem = integrate(torch.where(fired, self.v_reset, mem))
            return self.surrogate(mem - threshold, inclusive=self.threshold_inclusive), mem
        after = integrate(mem)
        for left in waits:
            after = torch.where(left > 0, mem, after)
        spikes = self.surrogate(after - threshold, inclusive=self.threshold_inclusive)
        for left in waits:
            spikes = spikes.masked_fill(left > 0, 0)
        if self.reset == "subtract":
            after = after - scaled(self.v_threshold, spikes.detach())
        elif self.reset == "value":
            after = torch.where(spikes.detach() > 0, self.v_reset, after)
        if not waits:
            return spikes, after
        (left,) = waits
        return spikes, after, torch.where(spikes.detach() > 0, self._steps, (left - 1).clamp(min=0)).to(left)


def decay_of(dt: float, tau: Parameter) -> Parameter:
    """Return the share that a step leaves of what decays with a time constant."""
    return 1 - dt / at_least(dt, tau)


def gain_of(dt: float, tau: Parameter, r: Parameter) -> Parameter:
    """Return what one unit of current adds to a membrane in a step."""
    return r * dt / at_least(dt, tau)


def at_least(dt: float, tau: Parameter) -> Parameter:
    """Return a time constant; one that learns is dt where it falls below."""
    return tau.clamp(min=dt) if isinstance(tau, nn.Parameter) else tau


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
    r: Parameter
    v_leak: Parameter

    @property
    def beta(self) -> Parameter:
        """Share of a membrane that a step leaves: 1 - dt / tau_mem, or the share that learns in its place."""
        return self.share_of("tau_mem")

    @property
    def gain(self) -> Parameter:
        """The change by one unit of current in a step: r · dt / tau_mem, or 1 where r is None."""
        return gain_of(self.dt, self.tau_mem, self.r) if "r" in self.parameter_names else 1.0

    def _integrate(self, mem: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        return leaky_step(mem, current, self.beta, self.gain, self.v_leak)


def stated(**parameters: Parameter | None) -> dict[str, Parameter]:
    """Return the parameters that are not None."""
    return {name: value for name, value in parameters.items() if value is not None}
