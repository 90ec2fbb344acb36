"""``PopulationProgram``: some populations of a network, which a backend advances by many steps in one call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import torch

from q4_programs import BoundProgram, Op, Program, SparseWeight, View, bind, pack_bits, unpack_bits
from q4_programs.ops import WORD
from q4_programs.watch import hook_of
from q4_snn.emission import Emission, Source
from q4_snn.projection import coming_of
from q4core.plugin_api import outside_inference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from q4_snn.graph import Graph
    from q4_snn.projection import Synapses
    from q4_snn.state import NetworkState
    from q4core import Q4Linear

__all__ = ["CHUNK", "PopulationProgram"]

CHUNK = 64
"""Steps of a call: what is recorded of them stays in a cache."""


class PopulationProgram:
    """Some populations of a network as a program: a call advances them by a chunk of steps, natively.

    What a population gives is in a ring: step t is slot t mod slots. The rings of populations that are read but not run
    here, and of inputs, hold what these gave when ``run`` begins. Everything else is written by ``run``.

    Args:
        graph: The network's.
        names: Populations with neurons; they run by the order of a step.
        batch: B.
        chunk: The most steps of a call.
        outputs: Name of a population that fires → the ring of its spikes, int64 [slots, B, words], contiguous, as
            ``q4_programs.pack_bits`` makes words. Defaults to rings of its own; shared memory will do.
        device: Where all of it is, the network's modules too.
        packs: Inputs with ``spikes=True`` whose numbers are in ``values`` instead, and become bits here.
        record: Names of populations for what they give, or a name and which state: [B, n] of each step, in
            ``records``.

    Attributes:
        outputs: Name of a population that fires, and is run or read → the ring of its spikes.
        values: Name of an input of other numbers, or of a population that does not fire, and is run or read → float32
            [slots, B, n].
        odd: Name of an input in ``packs`` → where its numbers were neither 0 nor 1, as ``outputs``.
        states: Name of a population that is run → its state, float32 [B, n] each, by the order of ``neuron.states``.
        coming: Name of a projection → what is on its way, as ``coming`` of ``Synapses`` gives it.
        records: What ``record`` names → float32 [chunk, B, n]: step t is row t mod chunk.
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
        packs: Iterable[str] = (),
        record: Iterable[tuple[str, int | None]] = (),
    ) -> None:
        self._graph, self.batch, self.chunk, self.device = graph, batch, chunk, torch.device(device)
        self.names = tuple(name for name in graph.order if name in {*names})
        with outside_inference(), torch.no_grad():
            self._build(dict(outputs or {}), set(packs), [*record])

    def _build(self, outputs: dict[str, torch.Tensor], packs: set[str], record: list[tuple[str, int | None]]) -> None:
        graph, batch = self._graph, self.batch
        emission = self._emission = Emission(batch, self.device)
        self.clock = emission.tensors[emission.clock.buffer]
        into = {name: graph.into(name) for name in self.names}
        held = {*self.names, *(item.source for items in into.values() for item in items)}
        held |= {name for name, _ in record}
        self._sources = {name: self._source(name, outputs) for name in graph.populations if name in held}
        rings = emission.tensors
        self.outputs = {n: rings[s.ring.buffer] for n, s in self._sources.items() if s.is_binary}
        self.values = {n: rings[s.ring.buffer] for n, s in self._sources.items() if not s.is_binary}
        self.odd: dict[str, torch.Tensor] = {}
        self.coming: dict[str, torch.Tensor] = {}
        self.states: dict[str, tuple[torch.Tensor, ...]] = {}
        for name in sorted(packs & held):
            self._pack(name)
        states = {name: self._emit_population(name, into[name]) for name in self.names}
        self.records = {key: self._emit_record(*key, states) for key in record}
        program = Program(
            emission.buffers, emission.steps, [_sizes(item) for item in emission.layers], emission.clock.buffer
        )
        tensors = [rings[index] for index in sorted(rings)]
        label = ", ".join(self.names)
        self.bound: BoundProgram = bind(program, tensors, emission.layers, name=f"populations {label}")

    def _source(self, name: str, outputs: Mapping[str, torch.Tensor]) -> Source:
        """Return the ring of what a population gives, as a view."""
        part, emission = self._graph.populations[name], self._emission
        emission.label = f"population {name!r}"
        longest = max(
            (self._reach(item) for item in self._graph.projections.values() if item.source == name), default=0
        )
        slots = self.chunk + longest + 1
        columns = -(-part.size // WORD) if part.is_binary else part.size
        dtype = torch.int64 if part.is_binary else torch.float32
        ring = outputs.get(name) if part.is_binary else None
        if ring is None:
            ring = torch.zeros(slots, self.batch, columns, dtype=dtype, device=self.device)
        facts = ring.dtype, tuple(ring.shape[1:]), ring.is_contiguous(), len(ring) >= slots
        if facts != (dtype, (self.batch, columns), True, True):
            emission.refuse(f"its ring must be {dtype} [{slots} or more, {self.batch}, {columns}], contiguous")
        return Source(name, part.size, emission.bound(ring, "ring"), part.is_binary)

    def _reach(self, item: Synapses) -> int:
        """Return how many steps back a projection reads, and has to read to make again what is on its way."""
        coming = coming_of(item, 1)
        return item.delay if coming is None else max(item.delay, len(coming))

    def _pack(self, name: str) -> None:
        """Emit that numbers of an input become bits."""
        emission, source = self._emission, self._sources[name]
        emission.label = f"population {name!r}"
        values = torch.zeros(self.chunk, self.batch, source.size, device=self.device)
        odd = torch.zeros_like(self.outputs[name])
        self.values[name], self.odd[name] = values, odd
        x = emission.row(emission.bound(values, "input"))
        emission.step(Op.PACK, (x, emission.clock), (source.ring, emission.bound(odd, "odd")))

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
        views = [emission.bound(item, kind) for kind, item in zip(neuron.states, rest, strict=True)]
        total: View | None = None
        for item in into:
            emission.label = f"projection {item.name!r}"
            coming, ring = coming_of(item, self.batch), None
            if coming is not None:
                self.coming[item.name] = coming = coming.contiguous()
                ring = emission.bound(coming, "ring")
            current = emission.projection(item, self._sources[item.source], ring)  # type: ignore[arg-type]  # a module
            if (reversal := getattr(item, "reversal", None)) is not None:
                driving = emission.affine(views[neuron.states.index("mem")], -1.0, reversal)
                emission.step(Op.MULTIPLY, (current, driving), (current,))
            total = current if total is None else emission.add(total, current, total)
        emission.label = f"population {name!r}"
        if total is None:
            total = emission.bound(torch.zeros(self.batch, part.size, device=self.device), "no input")
        given = emission.neuron(neuron, total, views, source.ring if source.is_binary else None)
        if given is not None:
            emission.step(Op.STORE_ROW, (given, emission.clock), (source.ring,))
        return views

    def _emit_record(self, name: str, index: int | None, states: Mapping[str, list[View]]) -> torch.Tensor:
        """Emit that what a population gives, or a state of it, is stored; return where."""
        emission, source = self._emission, self._sources[name]
        emission.label = f"record of {name!r}"
        found = torch.zeros(self.chunk, self.batch, source.size, device=self.device)
        if index is not None:
            value = states[name][index]
        elif source.is_binary:
            value = emission.unpack(source.ring, source.size)
        else:
            value = emission.row(source.ring)
        emission.step(Op.STORE_ROW, (value, emission.clock), (emission.bound(found, "record"),))
        return found

    def run(self, first: int, count: int) -> None:
        """Advance by some steps.

        Args:
            first: Number of steps before.
            count: 1 … ``chunk``.

        Raises:
            LifecycleError: A layer was closed, moved or loaded since.
        """
        self.clock.fill_(first)
        self.bound(rounds=count)

    def load(self, state: NetworkState) -> None:
        """Take the state of a network before the next step; neurons that it does not have are at rest."""
        for name, tensors in self.states.items():
            neuron = self._graph.populations[name].neuron
            given = state.neurons.get(name)
            if given is None and neuron is not None:
                given = neuron.rest(tensors[0])
            for own, value in zip(tensors, given or (), strict=True):
                own.copy_(value)
        for name, depth in self._graph.depths.items():
            past = state.history.get(name, ())
            for rings, is_bits in ((self.outputs, True), (self.values, False)):
                if name not in rings or (not is_bits and name in self.odd):
                    continue
                for lag in range(1, depth + 1):
                    slot = rings[name][(state.clock - lag) % len(rings[name])]
                    if lag > len(past):
                        slot.zero_()
                    else:
                        slot.copy_(pack_bits(past[lag - 1] != 0) if is_bits else past[lag - 1])
        for name, ring in self.coming.items():
            ring.copy_(state.coming[name])

    def state(self, before: NetworkState, steps: int) -> NetworkState:
        """Return the state of a network some steps after the one that ``load`` took."""
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
            neurons={name: tuple(item.clone() for item in items) for name, items in self.states.items()},
            history=history,
            coming={name: ring.clone() for name, ring in self.coming.items()},
            clock=clock,
        )

    def non_finite(self) -> list[str]:
        """Return the names of populations with a state that is NaN or infinite."""
        return [
            name
            for name, items in self.states.items()
            if not all(math.isfinite(float(item.sum())) or bool(item.isfinite().all()) for item in items)
        ]


def _sizes(layer: Q4Linear | SparseWeight) -> tuple[int, int]:
    """Return (targets, sources) of a layer of a program."""
    if isinstance(layer, SparseWeight):
        return layer.targets, layer.sources
    return layer.out_features, layer.in_features
