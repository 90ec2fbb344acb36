"""``Stepper``: steps of some populations of a network, over rows of rings."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_snn.engine import PopulationProgram
from q4_snn.graph import Graph
from q4_snn.network import advance
from q4_snn.population import Population
from q4_snn.projection import coming_of, memory_of, product_of
from q4core import Q4Error, Session, SessionConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from q4_actors import Rings, SharedWeight
    from q4_snn.network import Arrival
    from q4_snn.projection import Product, Synapses
    from q4_snn.rows import Layout, Row

__all__ = ["Part", "Plan", "SharedSynapses", "Stepper", "Trace"]


@attrs.frozen(eq=False)
class SharedSynapses:
    """A projection as an actor gets it: a copy, whose packed layers are in shared memory.

    Args:
        item: The copy, with a place for each packed layer.
        layers: Name of the place → the shared weight, and what the layer was asked for.
    """

    item: Synapses
    layers: Mapping[str, tuple[SharedWeight, SessionConfig]]

    def product(self) -> Product:
        """Return what computes the projection in this process."""
        module: Any = self.item
        for name, (weight, config) in self.layers.items():
            module.set_submodule(name, weight.layer(Session(config)))
        return product_of(self.item)


@attrs.frozen(eq=False)
class Part:
    """A population as an actor has it, the projections into it, and the form of its state."""

    population: Population
    into: tuple[SharedSynapses, ...]
    layout: Layout

    def is_stored(self, index: int, batch: int) -> bool:
        """Return whether what is on its way in a projection is a part of the state: it can't be made again."""
        item = self.into[index].item
        return memory_of(item) is None and coming_of(item, batch) is not None


@attrs.frozen(eq=False)
class Plan:
    """Facts of the network that all of its actors have.

    Args:
        rows: Population → the form of its rows.
        slots: Of each ring.
        depth: How many of the last rows a reader may need.
        chunk: The most steps of a message.
        stride: Steps after which rows are published at the latest.
        rest: [B, 1] of the dtype and on the device of the states.
        side: Of memory that CPU and GPU share, from which states are read and written.
        read: Names of populations that any projection reads.
    """

    rows: Mapping[str, Row]
    slots: int
    depth: int
    chunk: int
    stride: int
    rest: torch.Tensor
    side: str | None
    read: frozenset[str]


@attrs.frozen(eq=False)
class Trace:
    """A ring of a population's state tensor in each step, for a run that records it."""

    population: str
    index: int
    row: Row
    rings: Rings


class Stepper:
    """The states of some populations between two chunks, and their steps.

    A program runs them, where a backend has the operations of all; else their modules do, to the same bits. Steps are
    counted from 1.

    Args:
        parts: The populations, by the order of a step.
        rings: What all populations give.
        plan: Facts of the network.
    """

    def __init__(self, parts: Mapping[str, Part], rings: Rings, plan: Plan) -> None:
        self.parts, self.rings, self.plan = parts, rings, plan
        with torch.no_grad():
            self._products = {name: [item.product() for item in part.into] for name, part in parts.items()}
        self.states: dict[str, tuple[torch.Tensor, ...]] = {}
        self.coming: dict[str, list[torch.Tensor | None]] = {}
        self._done: dict[str, int] = {}
        self._programs: dict[tuple[tuple[str, int], ...], PopulationProgram | None] = {}
        self._current: PopulationProgram | None = None
        self.reason: str | None = None
        """Why no program runs them, if so."""

    def load(self, states: Mapping[str, tuple[int, Sequence[torch.Tensor]]]) -> None:
        """Begin with states: name → steps that are done, tensors. What is on its way is made again from rows."""
        self._current, batch = None, len(self.plan.rest)
        for name, (clock, tensors) in states.items():
            part = self.parts[name]
            stored = [part.is_stored(index, batch) for index in range(len(part.into))]
            count = len(tensors) - sum(stored)
            rest = iter(tensors[count:])
            self.states[name], self._done[name] = tuple(tensors[:count]), clock
            pairs = zip(part.into, self._products[name], stored, strict=True)
            self.coming[name] = [
                next(rest) if is_stored else self._renew(shared.item, product, clock)
                for shared, product, is_stored in pairs
            ]

    def tensors(self, name: str) -> list[torch.Tensor]:
        """Return the tensors of a population's state, as ``load`` takes them."""
        part, batch = self.parts[name], len(self.plan.rest)
        found = [*self.states[name]]
        found += [
            value for index, value in enumerate(self.coming[name]) if value is not None and part.is_stored(index, batch)
        ]
        return found

    def run(self, first: int, last: int, traces: Sequence[Trace]) -> None:
        """Do steps whose sources are there; populations that have done one already are left as they are."""
        own = [trace for trace in traces if trace.population in self.parts]
        program = self._program(own, first)
        if program is not None:
            self._run_program(program, first, last, own)
        else:
            self._current = None
            for step in range(first, last + 1):
                self._step(step, own)

    def run_by_turns(self, first: int, last: int, traces: Sequence[Trace], turns: Any) -> int | None:
        """Do steps by one call of a program, which waits for sources and publishes spikes between them.

        Args:
            first: The first step.
            last: The last one.
            traces: What is recorded.
            turns: Of ``Rings.turns``.

        Returns:
            The last step that was done, as sources may be late; None where only ``run`` can do them.
        """
        own = [trace for trace in traces if trace.population in self.parts]
        program = self._program(own, first)
        if program is None or not all(self._has_values(name, last) for name in program.values):
            return None
        turns.begin(first)
        return self._run_program(program, first, last, own, turns)

    # -- by a program

    def _has_values(self, name: str, last: int) -> bool:
        """Return whether numbers, which programs keep in rings of their own, are needed from or by no other actor."""
        if name in self.parts:
            return name not in self.plan.read
        return self.rings.stamp(name) >= last - min(item.delay for item in self._items() if item.source == name)

    def _program(self, traces: Sequence[Trace], first: int) -> PopulationProgram | None:
        """Return the program that records some states, with the states as they are before a step; None without one."""
        published, done = max(self.rings.stamp(name) for name in self.parts), first - 1
        if published > done or any(step > done for step in self._done.values()):
            return None  # what was published already is not written again
        key = tuple((trace.population, trace.index) for trace in traces)
        if key not in self._programs:
            self._programs[key] = self._make(key)
        program = self._programs[key]
        if program is not None and program is not self._current:
            for name, tensors in self.states.items():
                for own, value in zip(program.states[name], tensors, strict=True):
                    own.copy_(value)
                self.states[name] = program.states[name]
            for name, part in self.parts.items():
                for index, shared in enumerate(part.into):
                    if (coming := self.coming[name][index]) is not None:
                        self.coming[name][index] = program.coming[shared.item.name].copy_(coming)
            for name in program.values:
                self._mirror(program, name, range(max(1, done - self.plan.depth + 1), done + 1))
            self._current = program
        return program

    def _make(self, record: tuple[tuple[str, int], ...]) -> PopulationProgram | None:
        plan = self.plan
        if plan.rest.device.type != "cpu":
            self.reason = "rows lie in the memory of the CPU, states do not"
            return None
        items = [shared.item for part in self.parts.values() for shared in part.into]
        others = {item.source for item in items} - {*self.parts}
        sources = [Population(name, plan.rows[name].size, spikes=plan.rows[name].is_binary) for name in sorted(others)]
        rings = {
            name: self.rings.rows(name).view(plan.slots, len(plan.rest), -1)
            for name in (*others, *self.parts)
            if plan.rows[name].is_binary
        }
        try:
            graph = Graph([*sources, *(part.population for part in self.parts.values())], items)
            made = PopulationProgram(
                graph, [*self.parts], batch=len(plan.rest), chunk=plan.chunk, outputs=rings, record=record
            )
        except Q4Error as error:
            self.reason = str(error)
            return None
        reasons = made.bound.record.reasons
        self.reason = "; ".join(reasons) if made.bound.record.backend == "reference" else None
        return made if self.reason is None else None

    def _run_program(
        self, program: PopulationProgram, first: int, last: int, traces: Sequence[Trace], turns: Any = None
    ) -> int:
        """Do steps, and return the last one that was done."""
        for name in program.values:
            if name not in self.parts:
                delays = [item.delay for item in self._items() if item.source == name]
                self._mirror(program, name, range(max(1, first - max(delays)), last - min(delays) + 1))
        steps = range(first, last + 1)
        sizes = {trace: self.parts[trace.population].population.size for trace in traces}
        found = {trace: torch.empty(len(steps), len(self.plan.rest), size) for trace, size in sizes.items()}
        with program.bound.lock:
            records: dict[tuple[str, int | None], torch.Tensor] = {
                (it.population, it.index): found[it] for it in traces
            }
            done = program.run(first - 1, len(steps), records=records, turns=turns)
        steps = steps[:done]
        for name, ring in program.values.items():
            if name in self.parts:
                given = ring[[(step - 1) % len(ring) for step in steps]]
                self._write(self.rings.rows(name), self.plan.rows[name], given, steps)
        for trace in traces:
            self._write(trace.rings.rows("trace"), trace.row, found[trace][:done], steps)
        return first + done - 1

    def _mirror(self, program: PopulationProgram, name: str, steps: range) -> None:
        """Copy rows of numbers to the program's own ring."""
        ring, rows, row = program.values[name], self.rings.rows(name), self.plan.rows[name]
        if steps:
            given = row.read(rows[[(step - 1) % len(rows) for step in steps]])
            ring[[(step - 1) % len(ring) for step in steps]] = given

    @staticmethod
    def _write(rows: torch.Tensor, row: Row, given: torch.Tensor, steps: range) -> None:
        new = torch.zeros(len(steps), row.words, dtype=torch.int64)
        row.write(new, given)
        rows[[(step - 1) % len(rows) for step in steps]] = new

    def _items(self) -> Iterator[Synapses]:
        for part in self.parts.values():
            for shared in part.into:
                yield shared.item

    # -- one by one

    def _step(self, step: int, traces: Sequence[Trace]) -> None:
        given: dict[tuple[str, int], torch.Tensor] = {}
        for name, part in self.parts.items():
            if self._done[name] >= step:  # by a predecessor, that was killed between two populations
                continue
            arrivals = self._arrivals(name, step, given)
            spikes, *after = advance(part.population, arrivals, self.states[name], rest=self.plan.rest, clock=step - 1)
            self.states[name] = (*after,)
            if self.rings.stamp(name) < step:
                self.plan.rows[name].write(self._row(name, step), spikes)
            for trace in traces:
                if trace.population == name:
                    rows = trace.rings.rows("trace")
                    trace.row.write(rows[(step - 1) % len(rows)], after[trace.index])

    def _arrivals(self, name: str, step: int, given: dict[tuple[str, int], torch.Tensor]) -> Iterator[Arrival]:
        """Yield what reaches a population in a step; ``given`` has what was read already."""
        coming = self.coming[name]
        for place, (shared, product) in enumerate(zip(self.parts[name].into, self._products[name], strict=True)):
            item = shared.item
            key = item.source, step - item.delay
            if key not in given:
                given[key] = self._output(*key)
            run = product
            if getattr(item, "sees_target", False):
                run = functools.partial(product, fired=self._output(name, step - 1))
            yield item, run, given[key], coming[place]

    def _output(self, name: str, step: int) -> torch.Tensor:
        """Return what a population gave in a step, [B, n]; zeros before the first."""
        row = self.plan.rows[name]
        if step <= 0:
            return self.plan.rest.new_zeros(row.batch, row.size)
        return row.read(self._row(name, step)).to(self.plan.rest.device)

    def _row(self, name: str, step: int) -> torch.Tensor:
        return self.rings.rows(name)[(step - 1) % self.plan.slots]

    def _renew(self, item: Synapses, product: Product, clock: int) -> torch.Tensor | None:
        """Return what is on its way after ``clock`` steps, made again from the last rows of the source."""
        memory, coming = memory_of(item), coming_of(item, len(self.plan.rest))
        if memory is not None and coming is not None:
            for step in range(max(0, clock - memory) + 1, clock + 1):
                product(self._output(item.source, step - item.delay), coming, step - 1)
        return coming
