"""Networks of actors: each population's state is a shared tensor, its spikes are bits in a ring."""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
import itertools
import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_actors import ActorDeadError, ActorError, AskTimeoutError, MailboxFullError, RingForm
from q4_snn.chunks import chunks, run_chunks
from q4_snn.engine import EVENTS
from q4_snn.projection import coming_of, memory_of, numbers_of
from q4_snn.recorders import events_of
from q4_snn.rows import Layout, Row
from q4_snn.sparse import SparseSynapses
from q4_snn.stepper import Part, Plan, SharedSynapses, Trace
from q4_snn.worker import COMMITTED, DONE, HALT, POLL_S, Chunk, Worker
from q4core import ConfigError, InputError, Q4Error, Q4Linear, SessionConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from q4_actors import ActorRef, ActorSystem, MutableTensor, SharedWeight
    from q4_snn.chunks import Inputs
    from q4_snn.network import Network
    from q4_snn.projection import Synapses
    from q4_snn.recorders import Recorder

__all__ = ["ActorNetwork"]

_CHUNKS = 2
"""Chunks that may be on their way, so that no actor waits for the next one."""
_QUIET_S = 60.0
"""How long an actor may take to end a message after a failure."""


def _source_of(network: Network, name: str) -> str | None:
    """Return what identifies the neurons of a population and the synapses into it; None for an input."""
    neuron = network.population(name).neuron
    if neuron is None:
        return None
    found = hashlib.sha256()

    def add(*values: Any) -> None:
        for value in values:
            is_tensor = isinstance(value, torch.Tensor)
            found.update(repr((value.dtype, value.shape) if is_tensor else value).encode())
            if is_tensor:
                found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    add(type(neuron).__name__, neuron.dt)
    add(*(getattr(neuron, option, None) for option in ("reset", "threshold_inclusive", "reset_delay")))
    add(*(item for parameter in neuron.parameter_names for item in (parameter, getattr(neuron, parameter))))
    for item in network.graph.into(name):
        add(item.source, item.delay, *numbers_of(item))
    return f"neurons and weights of digest {found.hexdigest()[:16]}"


class ActorNetwork:
    """A network whose populations are advanced by actors; it gives what ``network(x)`` gives.

    An actor does a chunk of steps for each message: it waits for the steps of others that it needs, publishes what its
    populations give as bits, and commits their states at the chunk's end. So the result does not depend on how many
    actors there are, who is late, or who is killed and restarted. Packed layers of projections are shared; neurons, and
    synapses that are not packed, are copied. ``system.checkpoint`` between two runs holds everything; with
    ``ActorSystem(resume=…)`` a network of equal neurons and weights resumes from there, on any runtime.

    Args:
        network: It is not changed, and later changes of it have no effect. Its projections may be of any class with
            the attributes of ``Synapses``. Processes get them pickled, hooks included: a projection with a hook that
            can't be pickled, such as a local function or a lambda, needs actors on threads.
        system: Runs the actors and holds the states, named as the populations.
        batch: B of what it will be given.
        actors: How many, at most one for each population with neurons. Each gets neighbours by the order of a step.
        chunk: Steps of a message, at most. More of them cost memory, 64 times as many bits as neurons, and save time.
        **options: Of ``system.mutable``, for all tensors. On threads ``device="cuda"`` and
            ``unified_memory="require_unified"`` put them where CPU and GPU reach them, uncopied; they are read and
            written from the device on which the network is.

    Raises:
        ConfigError: An argument is not legal, a population's name is taken in the system, or its checkpoint has steps
            of these populations that are not of one run.
        InputError: The checkpoint is of other neurons or weights, or of another batch; or there is too little shared
            memory.
        MessageError: Actors are processes, and a projection or one of its hooks can't be pickled.
        UnifiedMemoryError: Required, and impossible.
    """

    def __init__(
        self,
        network: Network,
        system: ActorSystem,
        *,
        batch: int,
        actors: int = 1,
        chunk: int = 64,
        **options: Any,
    ) -> None:
        self._network, self._system, self._batch, self._chunk = network, system, batch, chunk
        self._turn = threading.RLock()
        self._failure: Q4Error | None = None
        names = [name for name in network.order if name not in network.inputs]
        for what, value, most in (("batch", batch, None), ("actors", actors, len(names)), ("chunk", chunk, None)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
                rule = f"1 … {most}" if most else "a positive whole number"
                raise ConfigError("ActorNetwork", name=what, rule=rule, value=value)
        home = next((item.device for item in (*network.parameters(), *network.buffers())), torch.device("cpu"))
        self._rest = torch.zeros(batch, 1, device=home)
        self._rows = {
            name: Row(batch, item.size, item.is_binary, self._rest.dtype)
            for name, item in ((name, network.population(name)) for name in network.order)
        }
        depths = _depths_of(network)
        self._layouts: dict[str, Layout] = {}
        self._tensors: dict[str, MutableTensor] = {}
        self._traces: dict[tuple[str, int], Trace] = {}
        parts = {}
        for name in network.order:
            population, into = network.population(name), network.graph.into(name)
            neuron = population.neuron
            states = [] if neuron is None else [*neuron.rest(self._rest.expand(batch, population.size))]
            stored = [coming_of(item, batch) for item in into if memory_of(item) is None]
            states += [coming for coming in stored if coming is not None]
            layout = self._layouts[name] = Layout(states, depths[name], self._rows[name].words)
            first = torch.zeros(layout.size, dtype=torch.int64, device=home)
            layout.write(first, 0, states, first.new_zeros(depths[name] + 1, self._rows[name].words))
            source = _source_of(network, name)
            self._tensors[name] = system.mutable(first, name=name, source=source, **options)
            if neuron is not None:
                parts[name] = Part(copy.deepcopy(population), tuple(self._share(item) for item in into), layout)
        is_apart = home.type == "cpu" and any(tensor.device.type != "cpu" for tensor in self._tensors.values())
        self._side = "cpu" if is_apart else None
        clocks = {name: self._clock_of(name) for name in self._tensors}
        if len({*clocks.values()}) > 1:
            hint = "Resume from a checkpoint of a network with these populations, written between two runs."
            raise ConfigError("ActorNetwork", name="steps", rule="those of one run", value=clocks, hint=hint)
        groups = _split([(name, _cost_of(network, name)) for name in names], actors)
        self._clocks = [f"/neurons-{index}" for index in range(actors)]
        self._everyone = tuple(names)
        depth = self._depth = max(depths.values())
        self._slots = depth + _CHUNKS * chunk + 1
        forms = {name: RingForm(self._slots, row.words) for name, row in self._rows.items()}
        self._rings = system.rings(forms | dict.fromkeys([HALT, DONE, COMMITTED, *self._clocks], RingForm()))
        self._begin(self.clock)
        plan = Plan(
            rows=self._rows,
            slots=self._slots,
            depth=depth,
            chunk=chunk,
            stride=max(1, chunk // 4),
            rest=self._rest,
            side=self._side,
            read=frozenset(item.source for item in network.graph.projections.values()),
        )
        self._actors: list[ActorRef] = [
            system.spawn(
                Worker,
                clock,
                {name: parts[name] for name in group},
                {name: self._tensors[name] for name in group},
                self._rings,
                plan,
                name=clock.removeprefix("/"),
            )
            for clock, group in zip(self._clocks, groups, strict=True)
        ]

    def _begin(self, clock: int) -> None:
        """Set the stamps of rings that nobody uses yet."""
        for name in self._network.inputs:
            with self._tensors[name].read(device=self._side) as seen:
                self._layouts[name].restore(seen.tensor, self._rings.rows(name))
            self._rings.publish(name, clock, since=max(0, clock - self._depth))
        for name in (DONE, COMMITTED, *self._clocks):
            self._rings.publish(name, clock)

    def _share(self, item: Synapses) -> SharedSynapses:
        """Return a projection for an actor."""
        module: Any = item
        packed = {
            name: layer
            for name, layer in module.named_modules(remove_duplicate=False)
            if name and isinstance(layer, (Q4Linear, SparseSynapses))
        }
        copied = copy.deepcopy(item, {id(layer): nn.Identity() for layer in packed.values()})
        shared = {id(layer): self._share_layer(layer) for layer in packed.values()}  # once, however many names it has
        return SharedSynapses(copied, {name: shared[id(layer)] for name, layer in packed.items()})

    def _share_layer(self, layer: Q4Linear | SparseSynapses) -> tuple[SharedWeight, SessionConfig]:
        """Return a packed layer's weight for all actors, and the session that asks for what the layer was asked for."""
        if isinstance(layer, SparseSynapses):
            return self._system.share(layer), SessionConfig()
        record = layer.diagnostics()
        config = SessionConfig(
            device=str(record.device),
            backend=record.override,
            compute_path=record.compute_path,
            activation_precision=record.request.precision,
        )
        return self._system.share(layer), config

    def _clock_of(self, name: str) -> int:
        with self._tensors[name].read(device=self._side) as seen:
            return int(seen.tensor[0])

    @property
    def clock(self) -> int:
        """The number of steps that all populations have done, and committed."""
        return min(self._clock_of(name) for name in self._tensors)

    def row_bytes(self) -> dict[str, int]:
        """Return the bytes that each population publishes in a step."""
        return {name: 8 * row.words for name, row in self._rows.items()}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of each population's state, which is committed once a chunk."""
        return {name: 8 * layout.size for name, layout in self._layouts.items()}

    def __call__(
        self, x: torch.Tensor | Mapping[str, torch.Tensor], record: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run over time, from where the last call ended. Calls of several threads run one after the other.

        Args:
            x: As ``Network`` takes it, with the batch of ``batch``.
            record: As ``Network`` takes it.

        Returns:
            Each name of ``record`` → [T, B, n].

        Raises:
            InputError: x does not fit the inputs, or ``record`` names what is not there.
            NonFiniteStateError: A state is NaN or infinite at a chunk's end; the error names population and step.
                All states are those of the chunk's start.
            ActorDeadError: An actor failed more often than its system allows; the message has its error.
        """
        sequences, places = self._network.check_run(x, record)
        for name, value in sequences.items():
            if value.shape[1] != self._batch or value.shape[2] != self._network.population(name).size:
                rule = f"of shape [T, {self._batch}, {self._network.population(name).size}]"
                raise InputError(f"population {name!r}", name="input", rule=rule, value=list(value.shape))
        with self._turn:
            if self._failure is not None:
                raise self._failure
            return self._run(sequences, places)

    def run(
        self, inputs: Inputs, *, recorders: Sequence[Recorder] = (), steps: int | None = None, chunk: int = 64
    ) -> None:
        """Run over steps that come one by one, as ``Network.run`` does; from where the last call ended.

        Calls of other threads wait until it has ended.

        Args:
            inputs: As ``Network.run`` takes them, with the batch of ``batch``. Sources begin at ``clock``.
            recorders: What to record; results are in them.
            steps: How many; None to end with the inputs.
            chunk: Steps of one call.

        Raises:
            ConfigError: A number is not legal, or no input ends and ``steps`` is None.
            InputError: Inputs don't fit the network or each other, or a recorder names what is not there.
            NonFiniteStateError: As of a call; recorders have the calls before.
            ActorDeadError: As of a call.
        """
        self._network.check_recorders(recorders)
        with self._turn:
            first = self.clock
            parts = chunks(inputs, self._network.inputs, first=first, steps=steps, at_once=chunk)
            run_chunks(self, parts, recorders, first, self._network.firing())

    def coming(self, name: str) -> torch.Tensor:
        """Return what is on its way in a projection, or what it has learnt, as ``NetworkState.coming`` has it.

        Args:
            name: Of a projection with ``coming`` and without ``memory_steps``, such as a ``PlasticProjection``.

        Raises:
            InputError: There is no such projection.
        """
        item = self._network.graph.projections.get(name)
        if item is None or memory_of(item) is not None or coming_of(item, self._batch) is None:
            rule = "that of a projection whose state is stored, such as one that learns"
            raise InputError("ActorNetwork", name="projection", rule=rule, value=name)
        into = [
            other.name
            for other in self._network.graph.into(item.target)
            if memory_of(other) is None and coming_of(other, self._batch) is not None
        ]
        with self._tensors[item.target].read(device=self._side) as seen:
            _, tensors = self._layouts[item.target].read(seen.tensor)
        return tensors[len(tensors) - len(into) + into.index(name)]

    def _run(
        self, sequences: Mapping[str, torch.Tensor], places: Mapping[str, tuple[str, int | None]]
    ) -> dict[str, torch.Tensor]:
        of_states = {name: place for name, place in places.items() if not _is_given(place[1])}
        traces = {name: self._trace(population, index or 0) for name, (population, index) in of_states.items()}
        found: dict[str, list[torch.Tensor]] = {name: [] for name in places}
        start, steps = self.clock, len(next(iter(sequences.values())))
        for rings in (self._rings, *(trace.rings for trace in traces.values())):
            rings.forget(start)
        on_way: collections.deque[Chunk] = collections.deque()
        try:
            for done in range(0, steps, self._chunk):
                chunk = Chunk(start + done + 1, min(self._chunk, steps - done), tuple(traces.values()))
                self._feed(chunk, {name: value[done:] for name, value in sequences.items()})
                on_way.append(chunk)
                for actor in self._actors:
                    actor.tell(chunk)
                if len(on_way) == _CHUNKS:
                    self._collect(on_way, found, places, traces)
            while on_way:
                self._collect(on_way, found, places, traces)
        except BaseException as error:
            self._recover(on_way, error)
            raise
        given = {name: torch.cat(parts).to(self._rest.device) for name, parts in found.items()}
        return {name: events_of(item) if places[name][1] == EVENTS else item for name, item in given.items()}

    def _collect(
        self,
        on_way: collections.deque[Chunk],
        found: Mapping[str, list[torch.Tensor]],
        places: Mapping[str, tuple[str, int | None]],
        traces: Mapping[str, Trace],
    ) -> None:
        """Wait until all have done the first chunk, copy what is recorded, and wait until all have committed it."""
        last, where = on_way[0].last, on_way[0].places(self._slots)
        given = {population for population, state in places.values() if _is_given(state)}
        self._await(dict.fromkeys(self._everyone, last), on_way)
        self._await(dict.fromkeys(given, last), on_way, rows=True)
        for name, (population, _) in places.items():
            if (trace := traces.get(name)) is None:
                found[name].append(self._rows[population].read(self._rings.rows(population)[where]))
                continue
            if not trace.rings.wait({"trace": last}, _QUIET_S):  # it was published before
                raise ActorError(f"what was recorded of {name!r} is lost")
            found[name].append(trace.row.read(trace.rings.rows("trace")[where]))
        self._rings.publish(DONE, last)
        self._await(dict.fromkeys(self._clocks, last), on_way)
        self._commit_inputs(last)
        self._rings.publish(COMMITTED, last)
        on_way.popleft()

    def _trace(self, name: str, index: int) -> Trace:
        """Return where a state tensor of each step is recorded."""
        if (name, index) not in self._traces:
            row = attrs.evolve(self._rows[name], is_binary=False)
            rings = self._system.rings({"trace": RingForm(self._slots, row.words)})
            self._traces[name, index] = Trace(name, index, row, rings)
        return self._traces[name, index]

    def _feed(self, chunk: Chunk, inputs: Mapping[str, torch.Tensor]) -> None:
        """Write a chunk's inputs. The last chunk but one is committed, so nobody reads what was there."""
        places = chunk.places(self._slots)
        for name, value in inputs.items():
            row = self._rows[name]
            rows = torch.zeros(chunk.count, row.words, dtype=torch.int64)
            row.write(rows, value[: chunk.count])
            self._rings.rows(name)[places] = rows
            self._rings.publish(name, chunk.last, since=chunk.first - 1)

    def _commit_inputs(self, clock: int) -> None:
        for name in self._network.inputs:
            with self._tensors[name].write(wait=True, device=self._side) as state:
                self._layouts[name].write(state, clock, (), self._rings.rows(name))

    def _await(self, needs: Mapping[str, int], on_way: Sequence[Chunk], *, rows: bool = False) -> None:
        """Wait for stamps; chunks are sent again to actors that are late, as one that failed has lost its message.

        Raises:
            _HaltedError: A chunk can't be done.
            ActorDeadError: An actor failed too often.
        """
        while not self._rings.wait(needs, POLL_S, stop=HALT, rows=rows):
            if self._rings.stamp(HALT):
                raise _HaltedError
            self._system.check()
            for actor, chunk in itertools.product(self._actors, tuple(on_way)):
                with contextlib.suppress(MailboxFullError):
                    actor.tell(chunk, timeout=0)

    def _recover(self, on_way: Sequence[Chunk], cause: BaseException) -> None:
        """Bring all back to the last chunk that is committed; raise what ended a chunk, if that is the cause."""
        self._rings.publish(HALT, 1)
        try:
            clocks, errors = self._quiet(self._actors)
            clock = max(clocks)
            late = [actor for actor, own in zip(self._actors, clocks, strict=True) if own < clock]
            if late:  # they have lost their message after all had done the chunk
                self._rings.publish(HALT, 0)
                done = [chunk for chunk in on_way if chunk.last <= clock]
                for actor, chunk in itertools.product(late, done):
                    actor.tell(chunk)
                self._await(dict.fromkeys(self._clocks, clock), done)
                self._quiet(self._actors)
            self._commit_inputs(clock)
            self._rings.publish(COMMITTED, clock)
            for rings in (self._rings, *(trace.rings for trace in self._traces.values())):
                rings.rewind(clock)
            self._rings.publish(HALT, 0)
        except (Q4Error, _HaltedError) as error:
            self._failure = error if isinstance(error, Q4Error) else ActorError("a chunk failed while it was redone")
            if isinstance(cause, _HaltedError):
                raise self._failure from None
        else:
            if isinstance(cause, _HaltedError):
                raise errors[0] from None

    @staticmethod
    def _quiet(actors: Sequence[ActorRef]) -> tuple[list[int], list[Q4Error]]:
        """Let actors end their messages and forget what is not committed; return their clocks, and what failed.

        Raises:
            ActorError: One does not answer.
        """
        clocks, errors = [], []
        for actor in actors:
            try:
                clocks.append(actor.ask(None, timeout=_QUIET_S))
            except (ActorDeadError, AskTimeoutError, MailboxFullError):
                raise
            except Q4Error as error:
                errors.append(error)
                clocks.append(actor.ask(None, timeout=_QUIET_S))
        return clocks, errors


class _HaltedError(Exception):
    """An actor has found that a chunk can't be done."""


def _is_given(index: int | None) -> bool:
    """Return whether what a place names is what a population gives."""
    return index is None or index == EVENTS


def _depths_of(network: Network) -> dict[str, int]:
    """Return how many of each population's last rows its readers may need."""
    depths = dict.fromkeys(network.order, 0)
    for item in network.graph.projections.values():
        depths[item.source] = max(depths[item.source], item.delay + (memory_of(item) or 0))
        if getattr(item, "sees_target", False):
            depths[item.target] = max(depths[item.target], 1)
    return depths


def _cost_of(network: Network, name: str) -> int:
    """Return about how many synapses lead into a population."""
    costs = [network.population(name).size]
    for item in network.graph.into(name):
        count = getattr(item, "synapses", None)
        costs.append(count if isinstance(count, int) else item.source_size * item.target_size)
    return sum(costs)


def _split(costs: Sequence[tuple[str, int]], count: int) -> list[list[str]]:
    """Return runs of neighbours of about the same cost: no actor waits in a step for one that waits for it."""
    groups: list[list[str]] = [[]]
    left, share = count, sum(cost for _, cost in costs) / count
    done = 0.0
    for index, (name, cost) in enumerate(costs):
        is_full = groups[-1] and done + cost / 2 > share * len(groups)
        if left > 1 and (is_full or len(costs) - index < left):
            groups.append([])
            left -= 1
        groups[-1].append(name)
        done += cost
    return groups
