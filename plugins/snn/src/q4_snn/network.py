"""Networks: populations of neurons, and projections between them with delays."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from torch import nn

from q4_snn.chunks import chunks, run_chunks
from q4_snn.engine import EVENTS
from q4_snn.graph import Graph
from q4_snn.projection import coming_of, product_of
from q4_snn.recorders import events_of
from q4_snn.runs import runs_of
from q4_snn.sparse import SparseSynapses, refuse_export
from q4_snn.state import NetworkState
from q4core import InputError, Q4Linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from q4_programs import ProgramRecord
    from q4_snn.chunks import Inputs
    from q4_snn.neuron import Neuron
    from q4_snn.population import Population
    from q4_snn.projection import Product, Synapses
    from q4_snn.recorders import Recorder

    _Stages = list[tuple[Population, list[tuple[Synapses, Product]]]]

__all__ = ["Arrival", "Network", "NetworkState", "advance"]

_jit: Any = torch.jit


Arrival = tuple["Synapses", "Product", torch.Tensor, "torch.Tensor | None"]
"""A projection, what computes it, the spikes [B, m] that reach it, and what is on its way, which is written."""


def advance(
    population: Population,
    arrivals: Iterable[Arrival],
    state: tuple[torch.Tensor, ...],
    *,
    rest: torch.Tensor,
    clock: int,
) -> tuple[torch.Tensor, ...]:
    """Advance a population by one step; return what it gives, [B, n], then its state.

    Args:
        population: One with a neuron.
        arrivals: One for each projection into it; the next is asked for when the last one was used.
        state: Its state before the step; empty to begin at rest.
        rest: [B, …] of the dtype and on the device of the input that it has without projections.
        clock: Number of steps before this one.

    Raises:
        InputError: A projection gives another shape.
    """
    shape, total = (len(rest), population.size), None
    for item, product, spikes, coming in arrivals:
        current = product(spikes) if coming is None else product(spikes, coming, clock)
        if current.shape != shape:
            rule = f"a result of shape {[*shape]}"
            raise InputError(f"projection {item.name!r}", name="it", rule=rule, value=list(current.shape))
        if (reversal := getattr(item, "reversal", None)) is not None:
            current = current * (reversal - _membrane(population, state, current))
        total = current if total is None else total + current
    found: tuple[torch.Tensor, ...] = population(rest.new_zeros(shape) if total is None else total, state)
    return found


class Network(nn.Module):
    """Populations and the projections between them, which step together.

    In each step a population takes the sum of its projections: of what their sources gave in the same step, or
    ``delay`` steps ago. A call stores nothing but by ``state``.

    Args:
        populations: With names unlike one another; those without a neuron are inputs.
        projections: Between them.

    Raises:
        ConfigError: A name is there twice or unknown, sizes don't fit, an input has a projection into it, or
            projections without delay form a cycle.
    """

    def __init__(self, populations: Sequence[Population], projections: Sequence[nn.Module]) -> None:
        super().__init__()
        self.graph = Graph(populations, projections)  # type: ignore[arg-type]  # checked one by one
        self.populations = nn.ModuleDict(self.graph.populations)
        self.projections = nn.ModuleDict({str(item.name): item for item in projections})

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the populations without a neuron."""
        return self.graph.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the populations that no other one takes spikes of."""
        return self.graph.outputs

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the populations, each after those that it needs in the same step."""
        return self.graph.order

    def population(self, name: str) -> Population:
        """Return a population by name."""
        return self.graph.populations[name]

    def rest(
        self, batch: int = 1, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> NetworkState:
        """Return the state before the first step: neurons at rest, and nothing on its way.

        Its tensors may be written before a call takes it, such as membranes that begin at random.

        Args:
            batch: B.
            dtype: Of the inputs.
            device: Likewise.
        """
        like = torch.empty(0, dtype=dtype, device=device)
        parts = self.graph.populations.items()
        neurons = {
            n: part.neuron.rest(like.new_zeros(batch, part.size)) for n, part in parts if part.neuron is not None
        }
        depths = self.graph.depths.items()
        history = {n: (*(like.new_zeros(batch, self.population(n).size) for _ in range(d)),) for n, d in depths}
        begun = {n: coming_of(item, batch) for n, item in self.graph.projections.items()}
        return NetworkState(neurons, history, {n: ring for n, ring in begun.items() if ring is not None})

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
            InputError: An input is missing, or input or state is of another size.
            LifecycleError: As of ``forward``.
        """
        if self._is_traced():
            found: tuple[dict[str, torch.Tensor], NetworkState] = self._aside(self._step_once, inputs, state)
            return found
        return self._step_once(inputs, state)

    def _step_once(
        self, inputs: Mapping[str, torch.Tensor], state: NetworkState | None
    ) -> tuple[dict[str, torch.Tensor], NetworkState]:
        state = self._begin(inputs, state)
        inputs = {name: inputs[name] for name in self.inputs}
        self._check_spikes(inputs)
        return self._step(inputs, state, self._stages(lambda item: item))

    def _stages(self, product: Callable[[Any], Product]) -> _Stages:
        """Return the populations with neurons, by the order of a step, each with its projections and their products."""
        parts = [self.population(name) for name in self.order if name not in self.inputs]
        return [(part, [(item, product(item)) for item in self.graph.into(part.name)]) for part in parts]

    def _step(
        self, inputs: Mapping[str, torch.Tensor], state: NetworkState, stages: _Stages
    ) -> tuple[dict[str, torch.Tensor], NetworkState]:
        """Advance by one step; what is on its way is written."""
        given = dict(inputs)
        rest = next(iter(given.values()))
        neurons: dict[str, tuple[torch.Tensor, ...]] = {}
        for population, into in stages:
            name, arrivals = population.name, _arrivals(into, given, state, rest)
            before = state.neurons.get(name, ())
            given[name], *after = advance(population, arrivals, before, rest=rest, clock=state.clock)
            neurons[name] = (*after,)
        depths = self.graph.depths.items()
        history = {name: (given[name], *state.history.get(name, ()))[:depth] for name, depth in depths}
        return given, NetworkState(neurons, history, state.coming, state.clock + 1)

    def _begin(
        self, inputs: Mapping[str, torch.Tensor], state: NetworkState | None, *, copies: bool = True
    ) -> NetworkState:
        """Check a step's inputs and the state before it; return that state, with a copy of what is on its way."""
        for name in self.inputs:
            size = self.population(name).size
            x = inputs.get(name)
            if x is None or x.dim() != 2 or x.shape[1] != size:  # noqa: PLR2004  # [B, n]
                value = None if x is None else list(x.shape)
                raise InputError(f"population {name!r}", name="input", rule=f"of shape [B, {size}]", value=value)
        batch = len(inputs[self.inputs[0]])
        begun = {name: coming_of(item, batch) for name, item in self.graph.projections.items()}
        rings = {name: ring for name, ring in begun.items() if ring is not None}
        if state is None:
            return NetworkState({}, {}, rings)
        self._check_state(state, batch)
        for name in {**rings, **state.coming}:
            wanted, found = ([*held[name].shape] if name in held else None for held in (rings, state.coming))
            if found != wanted:
                raise InputError(f"projection {name!r}", name="state", rule=f"of shape {wanted}", value=found)
        coming = {name: state.coming[name].clone() if copies else state.coming[name] for name in rings}
        return attrs.evolve(state, coming=coming)

    def _check_state(self, state: NetworkState, batch: int) -> None:
        """Refuse neurons' states and histories of other populations, or of other sizes."""
        with_neurons = {*self.order} - {*self.inputs}
        for name in sorted(with_neurons & {*state.neurons}):
            neuron, found = self.population(name).neuron, state.neurons[name]
            if neuron is not None and len(found) != len(neuron.states):
                rule = f"the tensors of {', '.join(neuron.states)}"
                raise InputError(f"population {name!r}", name="state", rule=rule, value=f"{len(found)} tensors")
        for kind, held, names in (
            ("state", state.neurons, with_neurons),
            ("history", state.history, {*self.graph.depths}),
        ):
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
            state: The state that an earlier call returned, to continue from; None to begin at rest.
            record: What to return: names of populations for what they give, ``population.mem`` for a state,
                ``population.events`` for where spikes are. Defaults to ``outputs``.

        Returns:
            Each name of ``record`` → [T, B, n], of events int64 [count, 3]: step of this call, sample and neuron, in
            that order; and the state after the last step.

        Raises:
            InputError: x does not fit the inputs, or ``record`` names what is not there.
            NonFiniteStateError: A state is NaN or infinite after the last step, or after a chunk of a program.
            LifecycleError: Inside ``torch.export``; or ``torch.jit.trace``, with packed or sparse synapses.
        """
        if self._is_traced():
            found: tuple[dict[str, torch.Tensor], NetworkState] = self._aside(self._forward, x, state, record)
            return found
        return self._forward(x, state, record)

    def _is_traced(self) -> bool:
        """Return whether this is inside ``torch.compile``, with packed or sparse synapses, which have no graph.

        Raises:
            LifecycleError: Inside ``torch.export``; or inside ``torch.jit.trace``, with such synapses.
        """
        if not (torch.compiler.is_compiling() or _jit.is_tracing()):
            return False
        is_packed = any(isinstance(item, (Q4Linear, SparseSynapses)) for item in self.modules())
        if torch.compiler.is_exporting() or (is_packed and _jit.is_tracing()):
            refuse_export("a network")
        return is_packed

    @staticmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001  # the public one imports its compiler
    def _aside(call: Callable[..., Any], *values: Any) -> Any:
        return call(*values)

    def _forward(
        self, x: torch.Tensor | Mapping[str, torch.Tensor], state: NetworkState | None, record: Sequence[str] | None
    ) -> tuple[dict[str, torch.Tensor], NetworkState]:
        sequences, places = self.check_run(x, record, looks=False)
        runs = runs_of(self, self.graph)
        if (program := runs.program(sequences, places)) is not None:
            state = self._begin({name: value[0] for name, value in sequences.items()}, state, copies=False)
            return runs.run(program, sequences, state, places)
        self._check_spikes(sequences)
        found: dict[str, list[torch.Tensor]] = {name: [] for name in places}
        stages = self._stages(functools.partial(_for_run, sequences))
        state = self._begin({name: value[0] for name, value in sequences.items()}, state)
        for step in zip(*(value.unbind() for value in sequences.values()), strict=True):
            given, state = self._step(dict(zip(sequences, step, strict=True)), state, stages)
            for name, (population, index) in places.items():
                is_given = index is None or index == EVENTS
                found[name].append(given[population] if is_given else state.neurons[population][index or 0])
        for name, tensors in state.neurons.items():
            self.population(name).check_finite(tensors, step=state.clock - 1)
        given = {name: torch.stack(steps) for name, steps in found.items()}
        for name, (_, index) in places.items():
            if index == EVENTS:
                given[name] = events_of(given[name])
        return given, state

    def run(
        self,
        inputs: Inputs,
        state: NetworkState | None = None,
        *,
        recorders: Sequence[Recorder] = (),
        steps: int | None = None,
        chunk: int = 256,
    ) -> NetworkState | None:
        """Run over steps that come one by one, with memory for some steps alone; to the same bits as ``forward``.

        Args:
            inputs: A source; an iterable of steps, each [B, n], or a mapping of each input's name to [B, n]; or a
                mapping of names to sources and iterables of [B, n]. Sources begin at the state's clock.
            state: The state that an earlier call returned, to continue from; None to begin at rest.
            recorders: What to record; results are in them.
            steps: How many; None to end with the inputs.
            chunk: Steps of one call, in which memory is needed for inputs and recorded steps.

        Returns:
            The state after the last step; the given one where there is no step.

        Raises:
            ConfigError: A number is not legal, or no input ends and ``steps`` is None.
            InputError: Inputs don't fit the network or each other, or a recorder names what is not there.
            NonFiniteStateError: A state is NaN or infinite after a chunk; recorders have the chunks before.
        """
        self.check_recorders(recorders)
        first = 0 if state is None else state.clock
        latest = state

        def call(part: dict[str, torch.Tensor], record: tuple[str, ...]) -> Mapping[str, torch.Tensor]:
            nonlocal latest
            found: dict[str, torch.Tensor]
            found, latest = self(part, latest, record)
            return found

        parts = chunks(inputs, self.inputs, first=first, steps=steps, at_once=chunk)
        run_chunks(call, parts, recorders, first, self.firing())
        return latest

    @property
    def record(self) -> ProgramRecord:
        """Who ran it last as a program, or why its modules ran one by one."""
        return runs_of(self, self.graph).record

    def firing(self) -> frozenset[str]:
        """Return the names of populations that give spikes."""
        return frozenset(name for name, part in self.graph.populations.items() if part.is_binary)

    def check_recorders(self, recorders: Sequence[Recorder]) -> None:
        """Refuse recorders of what is not there.

        Raises:
            InputError: A population, a state or a neuron is not there, or a file is not open.
        """
        for item in recorders:
            item.check(self.population(self._place(item.what)[0]).size)

    def check_run(
        self, x: torch.Tensor | Mapping[str, torch.Tensor], record: Sequence[str] | None, *, looks: bool = True
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, int | None]]]:
        """Return x by the inputs' names; and for each name of ``record`` the population and which of its states.

        Args:
            x: As of ``forward``.
            record: Likewise.
            looks: Whether to check the numbers of inputs with ``spikes=True``.

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
        if looks:
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
        if (
            kind == "events"
            and kind not in states
            and population in self.populations
            and self.population(population).is_binary
        ):
            return population, EVENTS
        if population not in self.populations or (kind and kind not in states):
            rule = "names of populations, population.state, or population.events of one that fires"
            raise InputError("network", name="record", rule=rule, value=name)
        return population, states.index(kind) if kind else None


def _membrane(population: Population, state: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
    """Return the membranes [B, n] before a step; at rest where there was none."""
    neuron = cast("Neuron", population.neuron)
    return (state or neuron.rest(torch.zeros_like(like)))[neuron.states.index("mem")]


def _for_run(sequences: Mapping[str, torch.Tensor], item: Synapses) -> Product:
    """Return a projection's product for a run; where an input is known to its end, some steps ahead."""
    product = product_of(item)
    ahead: Callable[[torch.Tensor], Product] | None = getattr(product, "ahead", None)
    return product if ahead is None or item.delay or item.source not in sequences else ahead(sequences[item.source])


def _arrivals(
    into: Iterable[tuple[Synapses, Product]], given: Mapping[str, torch.Tensor], state: NetworkState, rest: torch.Tensor
) -> Iterator[Arrival]:
    """Yield what reaches a population by each projection into it."""
    for item, product in into:
        if not item.delay:
            spikes = given[item.source]
        elif len(past := state.history.get(item.source, ())) >= item.delay:
            spikes = past[item.delay - 1]
        else:
            spikes = rest.new_zeros(len(rest), item.source_size)  # none has arrived yet
        if getattr(item, "sees_target", False):
            last = next(iter(state.history.get(item.target, ())), None)
            yield item, functools.partial(product, fired=last), spikes, state.coming.get(item.name)
        else:
            yield item, product, spikes, state.coming.get(item.name)
