"""Networks: populations of neurons, and projections between them with delays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch
from torch import nn

from q4_nn import FilledLinear, STELinear
from q4_snn.neurons import Spiking
from q4core import ConfigError, InputError, Q4Error, Q4Linear, dequantize
from q4core.spikes import SpikeProduct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from q4_snn.neurons import Neuron

__all__ = ["Network", "NetworkState", "NonFiniteStateError", "Population", "Projection", "Synapses"]


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


def check_name(what: str, name: str, without: str) -> None:
    """Refuse what can't be the name of a module, as torch keeps them."""
    if not isinstance(name, str) or not name or {*without} & {*name}:
        raise ConfigError(what, name="name", rule=f"a word without {' and '.join(without)}", value=name)
    if hasattr(nn.ModuleDict(), name):
        rule = "none that torch's nn.ModuleDict has for something of its own"
        raise ConfigError(what, name="name", rule=rule, value=name, hint=f"Call it {name}_0, or what it stands for.")


class Synapses(Protocol):
    """What a network asks of a projection; every ``nn.Module`` that has it may be one.

    One with ``coming(batch)`` gets what that returned, which it may write, and the number of the step, beside spikes:
    it keeps what is on its way there, as ``SparseProjection`` does.
    """

    name: str
    source: str
    target: str
    source_size: int
    target_size: int
    delay: int

    def __call__(self, spikes: torch.Tensor, *on_its_way: Any) -> torch.Tensor:
        """Return the input of the target [..., target_size] from the source's spikes [..., source_size]."""


_ROWS_AHEAD = 64
"""Rows of spikes that go in one product, where they are known: their results, of some steps, stay in a cache."""
_Stages = list[tuple[Population, list[tuple[Synapses, Callable[..., torch.Tensor]]]]]


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
        name: ``source->target`` unless told.

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

    def for_run(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return ``forward`` for many steps in a row.

        Synapses that train in four bits are quantised once for all. Packed ones cost only the spikes that there are,
        as ``q4core.spikes.SpikeProduct``, where the source fires, and nothing records gradients.
        """
        if isinstance(self.synapses, STELinear):
            return functools.partial(nn.functional.linear, weight=self.synapses.quantised(), bias=self.synapses.bias)
        if self.is_binary and not torch.is_grad_enabled():
            return event_product(self.synapses)
        return self


def packed_layer(synapses: nn.Module) -> Q4Linear | None:
    """Return the packed layer that synapses are, or hold with inputs filled up to whole blocks; None where none is."""
    inner = synapses.layer if isinstance(synapses, FilledLinear) else synapses
    return inner if isinstance(inner, Q4Linear) else None


def event_product(synapses: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product of packed synapses with zeros and ones, at the cost of the ones; others as they are.

    What it is given must be known to be of zeros and ones: what is not 0 counts as 1.
    """
    layer: Any = packed_layer(synapses)
    if layer is None or layer.dtype is not torch.float32:
        return synapses
    return _EventProduct(layer, synapses.in_features)  # type: ignore[arg-type]  # those of x, before it is filled up


class _EventProduct:
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
        return self._product(self._ones(spikes))

    def ahead(self, spikes: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what is called for each step of spikes [T, B, n]: few rows go some steps at a time, to equal bits."""
        parts = spikes.split(max(1, _ROWS_AHEAD // max(1, spikes.shape[1])))
        results = (current for part in parts for current in self._product.steps(self._ones(part)))
        return lambda _: next(results)


@attrs.frozen(eq=False)
class NetworkState:
    """What a network is in after a step.

    Args:
        neurons: Population's name → its state tensors [B, n], by the order of ``neuron.states``.
        history: Name of a population with delayed projections → what it gave, the last step first, as far back as its
            longest delay needs.
        coming: Name of a projection with delays of its own → what is on its way, as its ``coming`` says.
        clock: How many steps were taken.
    """

    neurons: Mapping[str, tuple[torch.Tensor, ...]]
    history: Mapping[str, tuple[torch.Tensor, ...]]
    coming: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    clock: int = 0


class Network(nn.Module):
    """Populations and the projections between them, which step together.

    In each step a population takes the sum of its projections: of what their sources gave in the same step, or
    ``delay`` steps ago. Nothing is kept between calls but by ``state``.

    Args:
        populations: With names unlike one another; those without a neuron are inputs.
        projections: Between them.

    Raises:
        ConfigError: A name is there twice or unknown, sizes don't fit, an input has a projection into it, or
            projections without delay form a cycle.
    """

    def __init__(self, populations: Sequence[Population], projections: Sequence[nn.Module]) -> None:
        super().__init__()
        for what, items in (("population", populations), ("projection", projections)):
            names = [str(item.name) for item in items]
            if twice := {name for name in names if names.count(name) > 1}:
                hint = "Give it name=." if what == "projection" else None
                raise ConfigError("network", name=f"{what}s", rule="of different names", value=min(twice), hint=hint)
        self.populations = nn.ModuleDict({item.name: item for item in populations})
        self.projections = nn.ModuleDict({str(item.name): item for item in projections})
        if not self.inputs:
            raise ConfigError("network", name="populations", rule="at least one without a neuron, its input", value=[])
        self._into: dict[str, list[Synapses]] = {name: [] for name in self.populations}
        self._depth: dict[str, int] = {}
        for item in self._synapses():
            self._check_projection(item)
            self._into[item.target].append(item)
            if item.delay:
                self._depth[item.source] = max(self._depth.get(item.source, 0), item.delay)
        self.order = tuple(self._sorted())
        """Names of the populations, each after those that it needs in the same step."""

    def _synapses(self) -> Iterable[Synapses]:
        return self.projections.values()  # type: ignore[return-value]  # checked one by one

    def population(self, name: str) -> Population:
        """Return a population by name."""
        return self.populations[name]  # type: ignore[return-value]  # what the constructor put there

    def _check_projection(self, item: Synapses) -> None:
        what = f"projection {item.name!r}"
        for role in ("source", "target"):
            name, size = getattr(item, role), getattr(item, f"{role}_size")
            if name not in self.populations:
                rule = f"one of the network's populations, {', '.join(self.populations)}"
                raise ConfigError(what, name=role, rule=rule, value=name)
            if self.population(name).size != size:
                rule = f"of {self.population(name).size} neurons, as population {name!r} is"
                raise ConfigError(what, name=role, rule=rule, value=size)
        if self.population(item.target).neuron is None:
            raise ConfigError(what, name="target", rule="a population with a neuron, not an input", value=item.target)

    def _sorted(self) -> list[str]:
        """Return the populations so that each comes after those that it needs in the same step."""
        order: list[str] = []
        left = list(self.populations)
        while left:
            ready = [name for name in left if all(item.delay or item.source in order for item in self._into[name])]
            if not ready:
                raise self._cycle(left)
            order.append(ready[0])
            left.remove(ready[0])
        return order

    def _cycle(self, left: Sequence[str]) -> ConfigError:
        path = [left[0]]
        while path.count(path[-1]) < 2:  # noqa: PLR2004  # until one is met again
            sources = [item.source for item in self._into[path[-1]] if not item.delay and item.source in left]
            path.append(sources[0])
        told = "->".join(reversed(path[path.index(path[-1]) :]))
        hint = "Give one of them delay=1."
        return ConfigError("network", name="projections", rule="free of cycles without delay", value=told, hint=hint)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the populations without a neuron."""
        return tuple(name for name in self.populations if self.population(name).neuron is None)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the populations that no other one takes spikes of."""
        read = {item.source for item in self._synapses() if item.source != item.target}
        return tuple(name for name in self.populations if name not in read)

    def into(self, name: str) -> Sequence[Synapses]:
        """Return the projections into a population."""
        return tuple(self._into[name])

    def depth(self, name: str) -> int:
        """Return the longest delay of what a population gives, in steps."""
        return self._depth.get(name, 0)

    def closes_cycle(self, projection: Synapses) -> bool:
        """Say whether a projection leads back to a population that it depends on, and is not before it in a step."""
        reached, left = set(), [projection.target]
        while left:
            name = left.pop()
            if name not in reached:
                reached.add(name)
                left += [item.target for item in self._synapses() if item.source == name]
        is_back = self.order.index(projection.source) >= self.order.index(projection.target)
        return is_back and projection.source in reached

    def step(
        self, inputs: Mapping[str, torch.Tensor], state: NetworkState | None = None
    ) -> tuple[dict[str, torch.Tensor], NetworkState]:
        """Advance by one step.

        Args:
            inputs: Name of each input → [B, n].
            state: What the last step returned; None to begin at rest.

        Returns:
            What each population gave (spikes, or an ``LI``'s membranes), and the state.

        Raises:
            InputError: An input lacks, or input or state is of another size.
        """
        state = self._begin(inputs, state)
        inputs = {name: inputs[name] for name in self.inputs}
        self._check_spikes(inputs)
        return self._step(inputs, state, self._stages(lambda item: item))

    def _stages(self, product: Callable[[Any], Callable[..., torch.Tensor]]) -> _Stages:
        """Return the populations with neurons, by the order of a step, each with its projections and their products."""
        parts = [self.population(name) for name in self.order if name not in self.inputs]
        return [(part, [(item, product(item)) for item in self._into[part.name]]) for part in parts]

    def _step(
        self, inputs: Mapping[str, torch.Tensor], state: NetworkState, stages: _Stages
    ) -> tuple[dict[str, torch.Tensor], NetworkState]:
        """Advance by one step; what is on its way is written."""
        given = dict(inputs)
        example = next(iter(given.values()))
        neurons: dict[str, tuple[torch.Tensor, ...]] = {}
        for population, into in stages:
            name, shape, total = population.name, (len(example), population.size), None
            for item, product in into:
                spikes, ring = _arriving(item, given, state, example), state.coming.get(item.name)
                current = product(spikes) if ring is None else product(spikes, ring, state.clock)
                if current.shape != shape:
                    rule = f"a result of shape {[*shape]}"
                    raise InputError(f"projection {item.name!r}", name="it", rule=rule, value=list(current.shape))
                total = current if total is None else total + current
            total = example.new_zeros(shape) if total is None else total
            given[name], *after = population(total, state.neurons.get(name, ()))
            neurons[name] = (*after,)
        history = {name: (given[name], *state.history.get(name, ()))[:depth] for name, depth in self._depth.items()}
        return given, NetworkState(neurons, history, state.coming, state.clock + 1)

    def _begin(self, inputs: Mapping[str, torch.Tensor], state: NetworkState | None) -> NetworkState:
        """Check a step's inputs and the state before it; return that state, with a copy of what is on its way."""
        for name in self.inputs:
            size = self.population(name).size
            x = inputs.get(name)
            if x is None or x.dim() != 2 or x.shape[1] != size:  # noqa: PLR2004  # [B, n]
                value = None if x is None else list(x.shape)
                raise InputError(f"population {name!r}", name="input", rule=f"of shape [B, {size}]", value=value)
        batch = len(inputs[self.inputs[0]])
        parts: Any = self.projections
        rings: dict[str, torch.Tensor] = {
            name: item.coming(batch) for name, item in parts.items() if hasattr(item, "coming")
        }
        if state is None:
            return NetworkState({}, {}, rings)
        self._check_state(state, batch)
        for name in {**rings, **state.coming}:
            wanted, found = ([*held[name].shape] if name in held else None for held in (rings, state.coming))
            if found != wanted:
                raise InputError(f"projection {name!r}", name="state", rule=f"of shape {wanted}", value=found)
        return attrs.evolve(state, coming={name: state.coming[name].clone() for name in rings})

    def _check_state(self, state: NetworkState, batch: int) -> None:
        """Refuse neurons' states and histories of other populations, or of other sizes."""
        with_neurons = {*self.order} - {*self.inputs}
        for name in sorted(with_neurons & {*state.neurons}):
            neuron, found = self.population(name).neuron, state.neurons[name]
            if neuron is not None and len(found) != len(neuron.states):
                rule = f"the tensors of {', '.join(neuron.states)}"
                raise InputError(f"population {name!r}", name="state", rule=rule, value=f"{len(found)} tensors")
        for kind, held, names in (("state", state.neurons, with_neurons), ("history", state.history, {*self._depth})):
            for name in sorted({*held} | names):
                wanted = [batch, self.population(name).size] if name in names else None
                for shape in [list(tensor.shape) for tensor in held.get(name, ())] or [[]]:
                    if shape != wanted:
                        rule = f"of shape {wanted}"
                        raise InputError(f"population {name!r}", name=kind, rule=rule, value=shape)

    def forward(
        self,
        x: torch.Tensor | Mapping[str, torch.Tensor],
        state: NetworkState | None = None,
        record: Sequence[str] | None = None,
    ) -> tuple[dict[str, torch.Tensor], NetworkState]:
        """Run over time.

        Args:
            x: [T, B, n] of the only input, or each input's name → [T, B, n].
            state: What a call before returned, to go on from there; None to begin at rest.
            record: What to return: names of populations for what they give, ``population.mem`` for a state;
                ``outputs`` unless told.

        Returns:
            Each name of ``record`` → [T, B, n], and the state after the last step.

        Raises:
            InputError: x does not fit the inputs, or ``record`` names what is not there.
            NonFiniteStateError: A state is NaN or infinite after the last step.
        """
        sequences, places = self.check_run(x, record)
        found: dict[str, list[torch.Tensor]] = {name: [] for name in places}
        stages = self._stages(functools.partial(_for_run, sequences))
        state = self._begin({name: value[0] for name, value in sequences.items()}, state)
        for step in zip(*(value.unbind() for value in sequences.values()), strict=True):
            given, state = self._step(dict(zip(sequences, step, strict=True)), state, stages)
            for name, (population, index) in places.items():
                found[name].append(given[population] if index is None else state.neurons[population][index])
        self._check_finite(state)
        return {name: torch.stack(steps) for name, steps in found.items()}, state

    def check_run(
        self, x: torch.Tensor | Mapping[str, torch.Tensor], record: Sequence[str] | None
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, int | None]]]:
        """Return x by the inputs' names; and for each name of ``record`` the population and which of its states.

        Raises:
            InputError: As of ``forward``.
        """
        sequences = {self.inputs[0]: x} if isinstance(x, torch.Tensor) and len(self.inputs) == 1 else x
        if isinstance(sequences, torch.Tensor) or set(sequences) != set(self.inputs):
            value = "a tensor" if isinstance(sequences, torch.Tensor) else sorted(sequences)
            raise InputError("network", name="x", rule=f"a mapping of inputs {', '.join(self.inputs)}", value=value)
        lengths = {value.shape[:2] for value in sequences.values() if value.dim() == 3}  # noqa: PLR2004  # [T, B, n]
        if len(lengths) != 1 or not min(lengths)[0] or any(value.dim() != 3 for value in sequences.values()):  # noqa: PLR2004  # as above
            shapes = {name: list(item.shape) for name, item in sequences.items()}
            rule = "tensors [T, B, n] of one T, at least 1, and one B"
            raise InputError("network", name="x", rule=rule, value=shapes)
        self._check_spikes(sequences)
        return dict(sequences), {name: self._place(name) for name in (self.outputs if record is None else record)}

    def _check_spikes(self, inputs: Mapping[str, torch.Tensor]) -> None:
        for name, x in inputs.items():
            if self.population(name).is_binary and bool((wrong := (x != 0) & (x != 1)).any()):
                rule = "0 and 1 alone, as spikes=True says"
                raise InputError(f"population {name!r}", name="input", rule=rule, value=x[wrong][0].item())

    def _place(self, name: str) -> tuple[str, int | None]:
        """Return which population a name of ``record`` means, and which of its states."""
        population, _, kind = name.partition(".")
        neuron = self.population(population).neuron if population in self.populations else None
        states = () if neuron is None else neuron.states
        if population not in self.populations or (kind and kind not in states):
            rule = "names of populations, or population.state"
            raise InputError("network", name="record", rule=rule, value=name)
        return population, states.index(kind) if kind else None

    def _check_finite(self, state: NetworkState) -> None:
        for name in self.order:
            neuron = self.population(name).neuron
            if neuron is not None:
                check_finite(name, neuron, state.neurons[name])


def _for_run(sequences: Mapping[str, torch.Tensor], item: Synapses) -> Callable[..., torch.Tensor]:
    """Return a projection's product for a run; where an input is known to its end, some steps ahead."""
    product = item.for_run() if isinstance(item, Projection) else item
    if isinstance(product, _EventProduct) and item.source in sequences and not item.delay:
        return product.ahead(sequences[item.source])
    return product


def _arriving(
    item: Synapses, given: Mapping[str, torch.Tensor], state: NetworkState, example: torch.Tensor
) -> torch.Tensor:
    """Return the spikes that reach a projection in this step."""
    if not item.delay:
        return given[item.source]
    if len(past := state.history.get(item.source, ())) >= item.delay:
        return past[item.delay - 1]
    return example.new_zeros(len(example), item.source_size)  # none has arrived yet


def check_finite(population: str, neuron: Neuron, state: Iterable[torch.Tensor]) -> None:
    """Raise a ``NonFiniteStateError`` if a state [B, n] is NaN or infinite."""
    for kind, value in zip(neuron.states, state, strict=True):
        if not math.isfinite(float(value.detach().sum())) and not bool(torch.isfinite(value).all()):
            bad = (~torch.isfinite(value)).any(0).sum()
            raise NonFiniteStateError(
                f"population {population!r}",
                name=kind,
                rule="finite",
                value=f"NaN or infinity in {int(bad)} of {value.shape[-1]} neurons",
                hint="Look at the input, and at the weights of the projections into it.",
            )
