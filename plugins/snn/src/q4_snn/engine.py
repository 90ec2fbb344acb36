"""``PopulationProgram``: some populations of a network, which a backend advances by many steps in one call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_programs import BoundProgram, Op, Program, SparseWeight, View, bind, pack_bits, unpack_bits
from q4_programs.ops import WORD
from q4_programs.watch import hook_of
from q4_snn.emission import Emission, Source, reads_now
from q4_snn.projection import coming_of
from q4core import InputError
from q4core.plugin_api import outside_inference

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from q4_programs import Turns
    from q4_snn.graph import Graph
    from q4_snn.projection import Synapses
    from q4_snn.state import NetworkState
    from q4core import Q4Linear

__all__ = ["CHUNK", "EVENTS", "PopulationProgram"]

CHUNK = 1024
"""Steps of a call: between two, a run looks at numbers and signals."""
EVENTS = -1
"""In the place of a state, to record bits: who fired."""


class PopulationProgram:
    """Some populations of a network as a program: a call advances them by a chunk of steps, natively.

    What a population gives is in a ring: step t is slot t mod slots. The rings of populations that are read but not run
    here hold what these gave when ``run`` begins. Everything else is written by ``run``: states in place, and what is
    recorded where the caller wants it.

    Args:
        graph: The network's.
        names: Populations with neurons; they run by the order of a step.
        batch: B.
        chunk: How many steps rings hold besides those that are read later: the most of a call, where rings are of
            ``outputs``, and of events.
        outputs: Name of a population that fires → the ring of its spikes, int64 [slots, B, words], contiguous, as
            ``q4_programs.pack_bits`` makes words. Defaults to rings of its own; shared memory will do.
        device: Where all of it is, the network's modules too.
        fed: Inputs whose numbers [T, B, n] each call of ``run`` gets; those with ``spikes=True`` become bits here.
        record: Names of populations for what they give, or a name and which state, or ``EVENTS``: of each step.

    Attributes:
        outputs: Name of a population that fires, and is run or read → the ring of its spikes.
        values: Name of an input of other numbers, or of a population that does not fire, and is run or read → float32
            [slots, B, n]; but of an input that is fed and read in the same step alone.
        states: Name of a population that is run → its state, float32 [B, n] each, by the order of ``neuron.states``,
            contiguous. A call advances the tensors that are here.
        coming: Name of a projection → what is on its way, as ``coming`` of ``Synapses`` gives it; likewise.
        clock: int64 [1, 1], the number of steps before the next one.
        bound: The program.

    Raises:
        EmissionError: A neuron or a projection has no operations; the message says which, and why.
        InputError: A ring of ``outputs`` has the wrong shape, dtype or length.
        BackendUnavailableError: No backend can run it.
    """

    def __init__(  # noqa: PLR0913  # one argument per part
        self,
        graph: Graph,
        names: Sequence[str],
        *,
        batch: int,
        chunk: int = CHUNK,
        device: torch.device | str = "cpu",
        outputs: Mapping[str, torch.Tensor] | None = None,
        fed: Iterable[str] = (),
        record: Iterable[tuple[str, int | None]] = (),
    ) -> None:
        self._graph, self.batch, self.chunk, self.device = graph, batch, chunk, torch.device(device)
        self.names = tuple(name for name in graph.order if name in {*names})
        self._are_shared = outputs is not None
        with outside_inference(), torch.no_grad():
            self._build(dict(outputs or {}), set(fed), [*record])

    def _build(self, outputs: dict[str, torch.Tensor], fed: set[str], record: list[tuple[str, int | None]]) -> None:
        graph, batch = self._graph, self.batch
        emission = self._emission = Emission(batch, self.device)
        self.clock = emission.tensors[emission.clock.buffer]
        into = {name: graph.into(name) for name in self.names}
        held = {*self.names, *(item.source for items in into.values() for item in items)}
        held |= {name for name, _ in record}
        self._given: dict[int, tuple[str, Hashable]] = {}
        with_events = {name for name, index in record if index == EVENTS}
        self._sources = {
            name: self._source(name, outputs, is_fed=name in fed, has_events=name in with_events)
            for name in graph.populations
            if name in held
        }
        rings = emission.tensors
        of_ring = {name: rings[item.ring.buffer] for name, item in self._sources.items() if item.ring is not None}
        self.outputs = {name: ring for name, ring in of_ring.items() if self._sources[name].is_binary}
        self.values = {name: ring for name, ring in of_ring.items() if not self._sources[name].is_binary}
        self.coming: dict[str, torch.Tensor] = {}
        self.states: dict[str, tuple[torch.Tensor, ...]] = {}
        states = {name: self._emit_population(name, into[name]) for name in self.names}
        for key in record:
            self._emit_record(*key, states)
        program = Program(
            emission.buffers, emission.steps, [_sizes(item) for item in emission.layers], emission.clock.buffer
        )
        tensors = [rings[index] for index in sorted(rings)]
        label = ", ".join(self.names)
        self.bound: BoundProgram = bind(program, tensors, emission.layers, name=f"populations {label}")

    def _source(self, name: str, outputs: Mapping[str, torch.Tensor], *, is_fed: bool, has_events: bool) -> Source:
        """Return the ring of what a population gives, as a view; emit what fills that of an input that is fed."""
        part, emission = self._graph.populations[name], self._emission
        emission.label = f"population {name!r}"
        items = [item for item in self._graph.projections.values() if item.source == name]
        now = None
        if is_fed:
            now = self._give("input", name, (self.batch, part.size), per="round")
            if not part.is_binary and all(map(reads_now, items)):
                return Source(name, part.size, None, is_binary=False, now=now)
        longest = max(map(self._reach, items), default=0)
        is_long = has_events or self._are_shared or not (is_fed or name in self.names)
        slots = longest + 1 + (self.chunk if is_long else 0)
        columns = -(-part.size // WORD) if part.is_binary else part.size
        dtype = torch.int64 if part.is_binary else torch.float32
        ring = outputs.get(name) if part.is_binary else None
        if ring is None:
            ring = torch.zeros(slots, self.batch, columns, dtype=dtype, device=self.device)
        facts = ring.dtype, tuple(ring.shape[1:]), ring.is_contiguous(), len(ring) >= slots
        if facts != (dtype, (self.batch, columns), True, True):
            emission.refuse(f"its ring must be {dtype} [{slots} or more, {self.batch}, {columns}], contiguous")
        view = emission.bound(ring, "ring")
        if now is not None and part.is_binary:
            odd = self._give("odd", name, (self.batch, columns), per="round", dtype=torch.int64)
            emission.step(Op.PACK, (now, emission.clock), (view, odd))
        elif now is not None:
            emission.step(Op.STORE_ROW, (now, emission.clock), (view,))
        return Source(name, part.size, view, part.is_binary, None if part.is_binary else now)

    def _give(
        self, kind: str, name: Hashable, shape: Sequence[int], *, per: str, dtype: torch.dtype = torch.float32
    ) -> View:
        """Return memory that ``run`` gives: which, of the dictionary of its kind."""
        view = self._emission.given(shape, kind, per=per, dtype=dtype)
        self._given[view.buffer] = kind, name
        return view

    def _reach(self, item: Synapses) -> int:
        """Return how many steps back a projection reads, and has to read to make again what is on its way."""
        coming = coming_of(item, 1)
        return item.delay if coming is None else max(item.delay, len(coming))

    def _emit_population(self, name: str, into: Sequence[Synapses]) -> list[View]:
        """Emit a step of a population, and return views of its state."""
        emission, part, source = self._emission, self._graph.populations[name], self._sources[name]
        emission.label = f"population {name!r}"
        neuron = part.neuron
        if neuron is None:
            emission.refuse("an input is not run")
        if hook := hook_of(part):
            emission.refuse(f"it has a hook ({hook})")
        rest = neuron.rest(torch.zeros(self.batch, part.size, device=self.device))
        self.states[name] = rest = tuple(item.contiguous() for item in rest)
        views = [self._give("state", (name, at), item.shape, per="run") for at, item in enumerate(rest)]
        total: View | None = None
        for item in into:
            emission.label = f"projection {item.name!r}"
            coming, ring = coming_of(item, self.batch), None
            if coming is not None:
                self.coming[item.name] = coming = coming.contiguous()
                ring = self._give("coming", item.name, coming.shape, per="run")
            current = emission.projection(item, self._sources[item.source], ring)  # type: ignore[arg-type]  # a module
            if (reversal := getattr(item, "reversal", None)) is not None:
                current = emission.own(current)
                driving = emission.affine(views[neuron.states.index("mem")], -1.0, reversal)
                emission.step(Op.MULTIPLY, (current, driving), (current,))
            total = current if total is None else emission.sum(total, current)
        emission.label = f"population {name!r}"
        if total is None:
            total = emission.bound(torch.zeros(self.batch, part.size, device=self.device), "no input")
        given = emission.neuron(neuron, total, views, source.ring if source.is_binary else None)
        if given is not None:
            emission.step(Op.STORE_ROW, (given, emission.clock), (source.held,))
        return views

    def _emit_record(self, name: str, index: int | None, states: Mapping[str, list[View]]) -> None:
        """Emit that what a population gives, or a state of it, is stored; events are found in its ring."""
        emission, source = self._emission, self._sources[name]
        emission.label = f"record of {name!r}"
        if index == EVENTS:
            return
        out = self._give("record", (name, index), (self.batch, source.size), per="round")
        if index is not None:
            emission.copy(states[name][index], out)
        else:
            emission.values(source, out=out)

    def run(
        self,
        first: int,
        count: int,
        inputs: Mapping[str, torch.Tensor] | None = None,
        records: Mapping[tuple[str, int | None], torch.Tensor] | None = None,
        turns: Turns | None = None,
    ) -> int:
        """Advance by some steps, and return how many were done.

        Args:
            first: Number of steps before.
            count: How many; at most ``chunk``, where rings of ``outputs`` or events are read.
            inputs: Name of an input that is fed → its numbers, float32 [count, B, n].
            records: What is recorded, without events → where, float32 [count, B, n].
            turns: What is called between steps, and may end the run.

        Raises:
            InputError: An input of spikes holds other numbers than 0 and 1; what was written is worth nothing.
            LifecycleError: A layer was closed, moved or loaded since.
        """
        odd: dict[str, torch.Tensor] = {}
        given = []
        for kind, key in self._given.values():
            name: Any = key
            if kind == "input" and inputs is not None:
                x = inputs[name]
                given.append(x if x[0].is_contiguous() else x.contiguous())
            elif kind == "record" and records is not None:
                given.append(records[name])
            elif kind == "odd":
                odd[name] = self.outputs[name].new_empty(count, *self.outputs[name].shape[1:])
                given.append(odd[name])
            else:
                given.append(self.coming[name] if kind == "coming" else self.states[name[0]][name[1]])
        self.clock.fill_(first)
        self.bound(count, given, turns)
        for name, bits in odd.items():
            if inputs is not None and bool(bits.any()):
                x = inputs[name]
                rule, value = "0 and 1 alone, as spikes=True says", x[(x != 0) & (x != 1)][0].item()
                raise InputError(f"population {name!r}", name="input", rule=rule, value=value)
        return int(self.clock) - first

    def events(self, name: str, first: int, count: int) -> torch.Tensor:
        """Return who fired in some of the last steps: int64 [events, 3] of step after ``first``, sample, neuron."""
        ring = self.outputs[name]
        start = first % len(ring)
        words = ring[start : start + count]
        if len(words) < count:
            words = torch.cat((words, ring[: count - len(words)]))
        found = words.nonzero()
        bits = np.unpackbits(words[found.unbind(1)].cpu().numpy().view(np.uint8), bitorder="little")
        which, bit = torch.from_numpy(bits).view(-1, WORD).nonzero().to(found.device).unbind(1)
        events = found[which]
        events[:, 2].mul_(WORD).add_(bit)
        return events

    def load(self, state: NetworkState) -> None:
        """Take a copy of the state of a network before the next step; neurons that it does not have are at rest."""
        for name, tensors in self.states.items():
            neuron = self._graph.populations[name].neuron
            given = state.neurons.get(name)
            if given is None and neuron is not None:
                given = neuron.rest(torch.zeros_like(tensors[0]))
            self.states[name] = tuple(_copy(item) for item in given or ())
        for name, depth in self._graph.depths.items():
            past = state.history.get(name, ())
            for rings, is_bits in ((self.outputs, True), (self.values, False)):
                if name not in rings:
                    continue
                for lag in range(1, depth + 1):
                    slot = rings[name][(state.clock - lag) % len(rings[name])]
                    if lag > len(past):
                        slot.zero_()
                    else:
                        slot.copy_(pack_bits(past[lag - 1] != 0) if is_bits else past[lag - 1])
        self.coming = {name: _copy(state.coming[name]) for name in self.coming}

    def state(self, before: NetworkState, steps: int) -> NetworkState:
        """Return the state of a network some steps after the one that ``load`` took, with the program's own tensors."""
        clock = before.clock + steps
        history = {}
        for name, depth in self._graph.depths.items():
            size, past = self._graph.populations[name].size, before.history.get(name, ())
            new = []
            for lag in range(1, min(depth, steps) + 1):
                if name in self.outputs:
                    ring = self.outputs[name]
                    new.append(unpack_bits(ring[(clock - lag) % len(ring)], size).to(torch.float32))
                else:
                    ring = self.values[name]
                    new.append(ring[(clock - lag) % len(ring)].clone())
            history[name] = (*new, *past)[:depth]
        return attrs.evolve(
            before,
            neurons=dict(self.states),
            history=history,
            coming=dict(self.coming),
            clock=clock,
        )

    def non_finite(self) -> list[str]:
        """Return the names of populations with a state that is NaN or infinite."""
        return [
            name
            for name, items in self.states.items()
            if not all(math.isfinite(float(item.sum())) or bool(item.isfinite().all()) for item in items)
        ]


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _sizes(layer: Q4Linear | SparseWeight) -> tuple[int, int]:
    """Return (targets, sources) of a layer of a program."""
    if isinstance(layer, SparseWeight):
        return layer.targets, layer.sources
    return layer.out_features, layer.in_features
