"""Time courses of synapses: exponential and alpha currents or conductances, for any projection."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_snn.neuron import at_least
from q4_snn.projection import coming_of, lacking, numbers_of, product_of
from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_snn.neuron import Parameter
    from q4_snn.projection import Product, Synapses

__all__ = ["AlphaSynapses", "ExpSynapses"]


class _Kinetics(nn.Module):
    """The base of time courses: a projection around another one, whose result it filters.

    What is on its way has rows behind those of the inner projection, one for each state, [rows, B, target_size]; it is
    a vector where the inner one's has another form.
    """

    inner: Synapses
    rows: int
    tau_syn: Parameter
    _like: torch.Tensor

    def __init__(
        self, projection: Synapses, tau_syn: Parameter, *, dt: float = 1e-4, reversal: float | None = None
    ) -> None:
        super().__init__()
        missing = ", ".join(lacking(projection))
        if missing or getattr(projection, "reversal", None) is not None:
            rule = "a module with what Synapses names, which gives no conductances"
            value = f"a {type(projection).__name__}" + (f" without {missing}" if missing else " with a reversal")
            raise ConfigError(type(self).__name__, name="projection", rule=rule, value=value)
        self.inner = projection
        self.name, self.source, self.target = projection.name, projection.source, projection.target
        self.source_size, self.target_size = projection.source_size, projection.target_size
        self.delay = projection.delay
        self.sees_target: bool = getattr(projection, "sees_target", False)
        self.dt, self.reversal = self._number("dt", dt), reversal
        if self.dt <= 0:
            raise self._refusal("dt", "above 0 seconds", dt)
        if reversal is not None:
            self.reversal = self._number("reversal", reversal)
        if isinstance(tau_syn, nn.Parameter):
            self.register_parameter("tau_syn", tau_syn)
        elif not isinstance(tau_syn, torch.Tensor):
            self.tau_syn = self._number("tau_syn", tau_syn)
        elif tau_syn.requires_grad:
            rule = f"a number, or a tensor [{self.target_size}] without gradients, or an nn.Parameter"
            raise self._refusal("tau_syn", rule, "a tensor with gradients")
        else:
            self.register_buffer("tau_syn", tau_syn.to(torch.get_default_dtype()), persistent=False)
        found = torch.as_tensor(self.tau_syn, dtype=torch.float64).detach()
        if found.shape not in {(), (self.target_size,)}:
            raise self._refusal("tau_syn", f"a number, or a tensor [{self.target_size}]", list(found.shape))
        if not bool((torch.isfinite(found) & (found >= self.dt * (1 - 1e-6))).all()):
            rule = f"dt ({self.dt:g} s) or more: a time course is longer than a step"
            raise self._refusal("tau_syn", rule, tau_syn)
        self.register_buffer("_like", torch.zeros(()), persistent=False)

    def _refusal(self, name: str, rule: str, value: object) -> ConfigError:
        return ConfigError(f"projection {self.name!r}", name=name, rule=rule, value=value)

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._refusal(name, "a finite number", value)
        return float(value)

    @property
    def decay(self) -> Parameter:
        """Share that a step leaves: exp(-dt / tau_syn); a tau_syn that learns is dt where it falls below."""
        tau = at_least(self.dt, self.tau_syn)
        return torch.exp(-self.dt / tau) if isinstance(tau, torch.Tensor) else math.exp(-self.dt / tau)

    def filter(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return what gives the states after a step [rows, B, n], from those before and from what arrives [B, n]."""
        raise NotImplementedError

    def coming(self, batch: int) -> torch.Tensor:
        """Return what is on its way, then the states, at rest, [steps + rows, batch, target_size]."""
        own = self._like.new_zeros(self.rows, batch, self.target_size)
        inner = coming_of(self.inner, batch)
        if inner is None:
            return own
        is_alike = inner.shape[1:] == own.shape[1:]
        return torch.cat([inner, own]) if is_alike else torch.cat([inner.reshape(-1), own.reshape(-1)])

    def forward(self, spikes: torch.Tensor, coming: torch.Tensor, step: int, **more: Any) -> torch.Tensor:
        """Return the currents, or conductances, of a step [B, target_size]; write the states, in place.

        Args:
            spikes: [B, source_size].
            coming: As ``coming`` returned it and steps before this one left it.
            step: The number of this step.
            **more: What else the inner projection gets.
        """
        return _Run(self, self.inner)(spikes, coming, step, **more)

    def for_run(self) -> Product:
        """Return ``forward`` for many steps in a row: by the inner projection's own."""
        return _Run(self, product_of(self.inner))

    def numbers(self) -> tuple[Any, ...]:
        """Return what decides what it gives."""
        return (type(self).__name__, self.dt, self.reversal, self.tau_syn, *numbers_of(self.inner))

    def extra_repr(self) -> str:
        """Return the facts that ``print(model)`` shows."""
        tau = self.tau_syn
        shown = f"tau_syn=[{tau.numel()}]" if isinstance(tau, torch.Tensor) else f"tau_syn={tau:g}"
        return f"{shown}, dt={self.dt:g}" + ("" if self.reversal is None else f", reversal={self.reversal:g}")


class _Run:
    """A projection's product, filtered; ``ahead`` is there where the product has it."""

    def __init__(self, kinetics: _Kinetics, product: Product) -> None:
        self._kinetics, self._product, self._filter = kinetics, product, kinetics.filter()
        self._shapes: dict[int, torch.Size | None] = {}
        if (ahead := getattr(product, "ahead", None)) is not None:
            self.ahead = lambda spikes: _Run(kinetics, ahead(spikes))

    def __call__(self, spikes: torch.Tensor, coming: torch.Tensor, step: int, **more: Any) -> torch.Tensor:
        kinetics, batch = self._kinetics, len(spikes)
        is_vector = coming.dim() == 1
        at = len(coming) - kinetics.rows * (batch * kinetics.target_size if is_vector else 1)
        inner, own = coming[:at], coming[at:]
        if is_vector:
            own = own.view(kinetics.rows, batch, kinetics.target_size)
            if batch not in self._shapes:
                found = coming_of(kinetics.inner, batch)
                self._shapes[batch] = None if found is None else found.shape
            inner = inner.view(self._shapes[batch] or inner.shape)
        arrived = self._product(spikes, inner, step, **more) if at else self._product(spikes)
        before = own.clone() if torch.is_grad_enabled() else own  # autograd may need it
        after = self._filter(before, arrived)
        own.copy_(after)
        return after[-1]


class ExpSynapses(_Kinetics):
    """Synapses whose current, or conductance, jumps by the weight and decays: ``i ← exp(-dt / tau_syn) · i + w``.

    The products are rounded, then the sum. Spikes act in the step in which they arrive. Each projection has a time
    course of its own, so that excitation and inhibition may differ.

    Args:
        projection: What spikes arrive by, of any class that has the protocol ``Synapses``.
        tau_syn: Time constant in seconds, at least dt; a number, or a tensor [target_size]. As an ``nn.Parameter`` it
            learns.
        dt: Seconds of a step, as of the neurons that it leads to.
        reversal: None for currents. Else weights are conductances g, and the current in a step is
            ``g · (reversal - mem)``, with the membrane before the step.

    Raises:
        ConfigError: An argument is not legal.

    Reference:
        Rotter and Diesmann, Exact digital simulation of time-invariant linear systems, 1999: NEST's ``iaf_psc_exp``.
    """

    rows = 1

    def filter(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return what gives the currents after a step."""
        decay = self.decay
        return lambda before, arrived: decay * before + arrived


class AlphaSynapses(_Kinetics):
    """Synapses whose current, or conductance, is an alpha function: ``w · (t / tau_syn) · exp(1 - t / tau_syn)``.

    It has its peak, the weight, tau_syn after the spike. With ``p = exp(-dt / tau_syn)``, a step is first ``i ← p · i +
    (e · dt / tau_syn · p) · s``, then ``s ← p · s + w``, rounded product by product; this is exact.

    Args:
        projection: As of ``ExpSynapses``, as are all others.

    Raises:
        ConfigError: An argument is not legal.

    Reference:
        As of ``ExpSynapses``: NEST's ``iaf_psc_alpha``.
    """

    rows = 2

    @property
    def gain(self) -> Parameter:
        """What a rising state adds to a current in a step: e · dt / tau_syn · exp(-dt / tau_syn)."""
        return math.e * self.dt / at_least(self.dt, self.tau_syn) * self.decay

    def filter(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return what gives the rising states, then the currents, after a step."""
        decay, gain = self.decay, self.gain

        def step(before: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
            rising, current = before
            return torch.stack([decay * rising + arrived, decay * current + gain * rising])

        return step
