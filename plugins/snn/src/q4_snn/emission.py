"""``Emission``: the operations of a step of populations, as neurons and projections emit them.

A neuron or a projection of any class may have a method ``emit_step(emission, …)``; those of this package are here. What
is emitted gives the bits of ``forward``, or nothing is emitted and the populations step one by one in torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
from torch import nn

from q4_programs import Buffer, EmissionError, Op, Step, View
from q4_programs.ops import WORD
from q4_programs.watch import hook_of
from q4_snn.kinetics import AlphaSynapses, ExpSynapses
from q4_snn.maps import LayerProjection, Scale
from q4_snn.neurons import ALIF, IF, LI, LIF, CubaLIF
from q4_snn.nonlinear import Izhikevich
from q4_snn.products import SpikeProduct
from q4_snn.projection import Projection, packed_layer
from q4_snn.sparse import SparseProjection
from q4core import Q4Error
from q4core.extension import LayerHandle
from q4core.plugin_api import describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_programs import SparseWeight
    from q4_snn.neuron import Neuron, Parameter, Spiking
    from q4core import Q4Linear

__all__ = ["Emission", "Source", "reads_now"]

_RESETS = {"none": 0, "subtract": 1, "value": 2}


@attrs.frozen
class Source:
    """What a projection reads: the ring of a population's outputs.

    Args:
        name: Of the population.
        size: Its neurons.
        ring: Bits [slots · B, words] where it fires, or else numbers [slots · B, n]; or None, where ``now`` has them.
        is_binary: Which of both.
        now: The numbers of an input [B, n], of which nobody needs those of earlier steps.
    """

    name: str
    size: int
    ring: View | None
    is_binary: bool
    now: View | None = None

    @property
    def held(self) -> View:
        """The ring."""
        if self.ring is None:
            raise EmissionError(f"population {self.name!r} has no ring")
        return self.ring


class Emission:
    """Buffers, layers and steps of a program of populations; a step is one round.

    Args:
        batch: Rows of every value: samples.
        device: Where all of it is.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch, self.device = batch, device
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []
        self.layers: list[Q4Linear | SparseWeight] = []
        self.tensors: dict[int, torch.Tensor] = {}
        """The bound buffers."""
        self.label = ""
        """What emits now, for messages."""
        self.refreshers: list[Callable[[], None]] = []
        """Functions that write parameters of neurons to their buffers anew."""
        self._vectors: dict[Any, View] = {}
        self.clock = self.bound(torch.zeros(1, 1, dtype=torch.int64, device=device), "clock")

    # -- memory

    def bound(self, tensor: torch.Tensor, name: str) -> View:
        """Return a contiguous tensor as a view [all but the last size, the last size]."""
        buffer = Buffer(f"{self.label} {name}".strip(), tensor.numel(), tensor.dtype, is_bound=True)
        self.buffers.append(buffer)
        self.tensors[len(self.buffers) - 1] = tensor
        return View(len(self.buffers) - 1, tensor.numel() // tensor.shape[-1], tensor.shape[-1])

    def given(self, shape: Sequence[int], name: str, *, per: str, dtype: torch.dtype = torch.float32) -> View:
        """Return memory that each run gives, or one for each of its rounds, as a view as of ``bound``."""
        size = math.prod(shape)
        self.buffers.append(Buffer(f"{self.label} {name}".strip(), size, dtype, given=per))
        return View(len(self.buffers) - 1, size // shape[-1], shape[-1])

    def own(self, x: View) -> View:
        """Return values that may be written: x where it is scratch, or else a copy."""
        return x if self._is_scratch(x) else self.copy(x)

    def _is_scratch(self, x: View) -> bool:
        buffer = self.buffers[x.buffer]
        return not buffer.is_bound and buffer.given is None

    def scratch(self, columns: int, *, is_bits: bool = False) -> View:
        """Return memory [B, columns] to be written."""
        dtype = torch.int64 if is_bits else torch.float32
        self.buffers.append(Buffer(f"{self.label} {len(self.buffers)}", self.batch * columns, dtype))
        return View(len(self.buffers) - 1, self.batch, columns)

    def vector(self, value: Parameter) -> View:
        """Return a number, or a tensor [n], as a vector [1, 1] or [1, n]."""
        found = torch.as_tensor(value, dtype=torch.float32).detach().reshape(1, -1).contiguous()
        key = tuple(found.view(torch.int32)[0].tolist()) if found.numel() == 1 else id(value)
        if key not in self._vectors or found.numel() > 1:
            self._vectors[key] = self.bound(found.to(self.device, copy=True), "parameter")
        return self._vectors[key]

    # -- operations

    def step(
        self, op: Op, inputs: Sequence[View], outputs: Sequence[View], numbers: Sequence[float] = (), **more: Any
    ) -> None:
        """Add a step; ``layer`` is a packed layer, or synapses."""
        layer, index = more.get("layer"), None
        if layer is not None:
            index = next((place for place, item in enumerate(self.layers) if item is layer), len(self.layers))
            self.layers[index:] = [layer] if index == len(self.layers) else self.layers[index:]
        self.steps.append(Step(op, inputs, outputs, index, numbers, self.label))

    def integrate(self, x: View, current: View, beta: Parameter, gain: Parameter = 1.0, leak: Parameter = 0.0) -> None:
        """Make x beta · x + gain · current + (1 - beta) · leak; ones and zeros cost nothing, as in ``leaky_step``."""
        has_leak = not (isinstance(leak, float) and leak == 0.0)
        has_gain = has_leak or not (isinstance(gain, float) and gain == 1.0)
        more = [self.vector(gain)] if has_gain else []
        more += [self.vector((1 - beta) * leak)] if has_leak else []
        self.step(Op.INTEGRATE, (x, current, self.vector(beta), *more), (x,))

    def multiply(self, x: View, factor: Parameter) -> View:
        """Return x times a number or a vector."""
        out = self.scratch(x.columns)
        self.step(Op.MULTIPLY, (x, self._row(factor, x.columns)), (out,))
        return out

    def add(self, x: View, other: View | Parameter, out: View | None = None) -> View:
        """Return the sum of x and values, or a number or a vector; ``out`` may be x."""
        out = self.scratch(x.columns) if out is None else out
        self.step(Op.ADD, (x, other if isinstance(other, View) else self._row(other, x.columns)), (out,))
        return out

    def sum(self, x: View, other: View) -> View:
        """Return the sum of two values, in the place of one that is scratch."""
        return self.add(x, other, next(filter(self._is_scratch, (x, other)), None))

    def affine(self, x: View, factor: float, shift: float) -> View:
        """Return x · factor + shift, rounded twice."""
        out = self.scratch(x.columns)
        self.step(Op.AFFINE, (x,), (out,), (factor, shift))
        return out

    def copy(self, x: View, out: View | None = None) -> View:
        """Return a copy, in ``out`` if it is given."""
        out = self.scratch(x.columns) if out is None else out
        self.step(Op.COPY, (x,), (out,))
        return out

    def _row(self, value: Parameter, columns: int) -> View:
        return self.vector(torch.as_tensor(value, dtype=torch.float32).expand(columns).contiguous())

    def bits(self, columns: int) -> View:
        """Return memory for the bits of one step."""
        return self.scratch(-(-columns // WORD), is_bits=True)

    def fire(  # noqa: PLR0913  # one argument per part
        self,
        mem: View,
        threshold: View,
        bits: View,
        *,
        reset: str = "none",
        amount: Parameter = 0.0,
        inclusive: bool = False,
        refractory: tuple[View, View, Parameter] | None = None,
    ) -> None:
        """Write who is above the threshold to bits, and reset it.

        Args:
            mem: In place.
            threshold: [B, n], or a vector.
            bits: A ring, or memory for one step.
            reset: As of ``LIF``.
            amount: What is subtracted, or what a membrane is set to.
            inclusive: Whether who is at the threshold fires.
            refractory: Steps left [B, n], in place; membranes before the step; steps to wait after a spike.
        """
        inputs, outputs = [mem, threshold, self.vector(amount), self.clock], [bits, mem]
        if refractory is not None:
            left, before, steps = refractory
            inputs += [left, before, self.vector(steps)]
            outputs.append(left)
        self.step(Op.FIRE, inputs, outputs, (_RESETS[reset], inclusive))

    def unpack(self, bits: View, columns: int, lag: int = 0, out: View | None = None) -> View:
        """Return the bits of a step as zeros and ones, in ``out`` if it is given."""
        out = self.scratch(columns) if out is None else out
        self.step(Op.UNPACK, (bits, self.clock), (out,), (lag,))
        return out

    def row(self, ring: View, lag: int = 0, out: View | None = None) -> View:
        """Return the values of a step from a ring, in ``out`` if it is given."""
        out = self.scratch(ring.columns) if out is None else out
        self.step(Op.ROW, (ring, self.clock), (out,), (lag,))
        return out

    def values(self, source: Source, lag: int = 0, out: View | None = None) -> View:
        """Return what a population gave some steps ago [B, n], in ``out`` if it is given; else it may be no scratch."""
        if source.is_binary:
            return self.unpack(source.held, source.size, lag, out)
        if source.now is not None and not lag:
            return source.now if out is None else self.copy(source.now, out)
        return self.row(source.held, lag, out)

    def refuse(self, why: str) -> NoReturn:
        """Refuse a program.

        Raises:
            EmissionError: Always.
        """
        raise EmissionError(f"{self.label}: {why}")

    # -- modules

    def neuron(self, neuron: Neuron, current: View, states: Sequence[View], bits: View | None) -> View | None:
        """Emit a step of a population: its states change in place.

        Args:
            neuron: What computes.
            current: Its input [B, n], which may be written.
            states: [B, n] each, by the order of ``neuron.states``.
            bits: The ring of its spikes; None where it gives numbers.

        Returns:
            What it gives [B, n] where these are numbers; None where they are spikes.

        Raises:
            EmissionError: It has no operations.
        """
        if type(neuron) not in _NEURONS:
            current = self.own(current)
        given: View | None = self._emit(neuron, _NEURONS, current, states, bits)
        return given

    def projection(self, item: nn.Module, source: Source, ring: View | None) -> View:
        """Emit what a projection gives in a step [B, n].

        Args:
            item: What computes.
            source: What it reads.
            ring: What is on its way; None where it has no such tensor.

        Raises:
            EmissionError: It has no operations.
        """
        given: View = self._emit(item, _PROJECTIONS, source, ring)
        return given

    def _emit(self, module: nn.Module, known: dict[type, Callable[..., Any]], *values: Any) -> Any:
        emitter = self._emitter(module, known)
        try:
            return emitter(module, self, *values)
        except Q4Error:
            raise
        except Exception as error:  # noqa: BLE001  # a third party's emitter
            self.refuse(f"its emitter raised {describe_exception(error)}")

    def _emitter(self, module: nn.Module, known: dict[type, Callable[..., Any]]) -> Callable[..., Any]:
        kind: Any = type(module)
        if hook := hook_of(module):
            self.refuse(f"it has a hook ({hook})")
        if "forward" in vars(module):
            self.refuse("its forward was replaced")
        if kind in known:
            return known[kind]
        # A class that changes forward alone has another result than what its parent emits.
        defines = next((item for item in kind.__mro__ if {"emit_step", "forward"} & vars(item).keys()), None)
        if defines is None or "emit_step" not in vars(defines):
            self.refuse(f"{kind.__name__} has no operations")
        emitter: Callable[..., Any] = kind.emit_step
        return emitter


def _li(neuron: LI, emission: Emission, current: View, states: Sequence[View], bits: None) -> View:
    del bits
    emission.integrate(states[0], current, neuron.beta, neuron.gain, neuron.v_leak)
    return states[0]


def _lif(neuron: LIF, emission: Emission, current: View, states: Sequence[View], bits: View) -> None:
    def integrate(mem: View) -> None:
        emission.integrate(mem, current, neuron.beta, neuron.gain, neuron.v_leak)

    _spike(neuron, emission, states, bits, integrate)


def _cuba_lif(neuron: CubaLIF, emission: Emission, current: View, states: Sequence[View], bits: View) -> None:
    syn, *rest = states
    emission.integrate(syn, current, neuron.alpha, neuron.input_gain)

    def integrate(mem: View) -> None:
        emission.integrate(mem, syn, neuron.beta, neuron.gain, neuron.v_leak)

    _spike(neuron, emission, rest, bits, integrate)


def _if(neuron: IF, emission: Emission, current: View, states: Sequence[View], bits: View) -> None:
    def integrate(mem: View) -> None:
        emission.integrate(mem, current, 1.0, neuron.gain)

    _spike(neuron, emission, states, bits, integrate)


def _alif(neuron: ALIF, emission: Emission, current: View, states: Sequence[View], bits: View) -> None:
    adapt, *rest = states
    threshold = emission.add(emission.multiply(adapt, neuron.adaptation), neuron.v_threshold)

    def integrate(mem: View) -> None:
        emission.integrate(mem, current, neuron.beta, neuron.gain, neuron.v_leak)

    _spike(neuron, emission, rest, bits, integrate, threshold)
    emission.integrate(adapt, emission.unpack(bits, adapt.columns), neuron.rho)


def _spike(  # noqa: PLR0913  # one argument per part
    neuron: Spiking,
    emission: Emission,
    states: Sequence[View],
    bits: View,
    integrate: Callable[[View], None],
    raised: View | None = None,
) -> None:
    """Emit what ``Spiking._fire`` does, for membranes and what may follow them in the state."""
    mem, *waits = states
    threshold = emission.vector(neuron.v_threshold) if raised is None else raised
    facts: dict[str, Any] = {"inclusive": neuron.threshold_inclusive}
    reset = neuron.reset
    amount = neuron.v_threshold if reset == "subtract" else neuron.v_reset
    if neuron.reset_delay and reset != "none":  # who was above the threshold is reset as this step begins
        before = emission.bits(mem.columns)
        emission.fire(mem, threshold, before, reset="value" if reset == "value" else "none", amount=amount, **facts)
        fired = emission.unpack(before, mem.columns) if reset == "subtract" else None
        integrate(mem)
        if fired is not None:  # the same as the difference, to the sign of zeros
            emission.add(mem, emission.multiply(fired, -amount), mem)
        emission.fire(mem, threshold, bits, **facts)
        return
    refractory = None
    if waits:
        refractory = waits[0], emission.copy(mem), neuron.refractory_steps  # at least one step
    integrate(mem)
    emission.fire(mem, threshold, bits, reset=reset, amount=amount, refractory=refractory, **facts)


def _izhikevich(neuron: Izhikevich, emission: Emission, current: View, states: Sequence[View], bits: View) -> None:
    recovery, mem = states
    less = emission.affine(recovery, -1.0, 0.0)
    followed = emission.multiply(mem, neuron.b)
    emission.add(followed, less, followed)
    followed = emission.multiply(followed, neuron.step_ms * neuron.a)
    rise = emission.affine(mem, 0.04, 5.0)
    emission.step(Op.MULTIPLY, (rise, mem), (rise,))
    rise = emission.affine(rise, 1.0, 140.0)
    for part in (less, current):
        emission.add(rise, part, rise)
    emission.add(mem, emission.multiply(rise, neuron.step_ms), mem)
    facts: dict[str, Any] = {"reset": neuron.reset, "amount": neuron.v_reset, "inclusive": neuron.threshold_inclusive}
    emission.fire(mem, emission.vector(neuron.v_threshold), bits, **facts)
    emission.add(recovery, followed, recovery)
    emission.add(recovery, emission.multiply(emission.unpack(bits, mem.columns), neuron.d), recovery)


_NEURONS: dict[type, Callable[..., Any]] = {
    LI: _li,
    LIF: _lif,
    CubaLIF: _cuba_lif,
    IF: _if,
    ALIF: _alif,
    Izhikevich: _izhikevich,
}


def _dense(item: Projection, emission: Emission, source: Source, ring: None) -> View:
    del ring
    layer = packed_layer(item.synapses)
    if layer is None:
        emission.refuse("its synapses are not packed, and no operation has the bits of torch's product")
    if layer.dtype is not torch.float32:
        emission.refuse(f"its layer is of {layer.dtype}")
    if source.is_binary:
        reason = SpikeProduct(layer).record.reason
        if reason is not None and "spiking" not in LayerHandle(layer).backend.capabilities.ops:
            emission.refuse(f"no product with spikes: {reason}")
        out = emission.scratch(item.target_size)
        emission.step(Op.SPIKES, (source.held, emission.clock), (out,), (item.delay,), layer=layer)
        return out
    if layer.in_features != item.source_size:
        emission.refuse("its layer was filled up to whole blocks, and its source gives other numbers than spikes")
    out = emission.scratch(item.target_size)
    emission.step(Op.LINEAR, (emission.own(emission.values(source, item.delay)),), (out,), layer=layer)
    return out


def _sparse(item: SparseProjection, emission: Emission, source: Source, ring: View) -> View:
    emission.step(
        Op.SEND,
        (source.held, emission.clock, ring),
        (ring,),
        (item.delay, emission.batch),
        layer=item.weight,
    )
    out = emission.scratch(item.target_size)
    emission.step(Op.TAKE, (ring, emission.clock), (out, ring))
    return out


def _layer(item: LayerProjection, emission: Emission, source: Source, ring: None) -> View:
    """Emit a layer that gives each target what one source gives, or that by a number: currents into each neuron."""
    del ring
    layer = item.synapses
    if type(layer) not in {nn.Identity, Scale} or "forward" in vars(layer) or hook_of(layer):
        kinds = ", ".join(type(part).__name__ for part in layer) if isinstance(layer, nn.Sequential) else ""
        emission.refuse(f"its layer {type(layer).__name__}{f' of {kinds}' if kinds else ''} has no operations")
    x = emission.values(source, item.delay)
    return emission.multiply(x, layer.scale.expand(item.shape).reshape(-1)) if isinstance(layer, Scale) else x


def _exponential(item: ExpSynapses, emission: Emission, source: Source, ring: View) -> View:
    arrived, (current,) = _arrived(item, emission, source, ring)
    emission.integrate(current, arrived, item.decay)
    return emission.copy(current)


def _alpha(item: AlphaSynapses, emission: Emission, source: Source, ring: View) -> View:
    arrived, (rising, current) = _arrived(item, emission, source, ring)
    emission.integrate(current, rising, item.decay, item.gain)
    emission.integrate(rising, arrived, item.decay)
    return emission.copy(current)


def _arrived(
    item: ExpSynapses | AlphaSynapses, emission: Emission, source: Source, ring: View
) -> tuple[View, list[View]]:
    """Emit what arrives by the inner projection; return it, and the states behind what is on its way there."""
    inner: Any = item.inner
    rows = emission.batch
    first = ring.rows - item.rows * rows
    held = View(ring.buffer, first, ring.columns) if first else None
    states = [View(ring.buffer, rows, ring.columns, at * ring.columns) for at in range(first, ring.rows, rows)]
    return emission.projection(inner, source, held), states


_PROJECTIONS: dict[type, Callable[..., Any]] = {
    Projection: _dense,
    SparseProjection: _sparse,
    LayerProjection: _layer,
    ExpSynapses: _exponential,
    AlphaSynapses: _alpha,
}


def reads_now(item: Any) -> bool:
    """Return whether what is emitted for a projection reads a source's numbers of the same step alone."""
    while type(item) in _PROJECTIONS and hasattr(item, "inner"):
        item = item.inner
    return type(item) in _PROJECTIONS and not item.delay
