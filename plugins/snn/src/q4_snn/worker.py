"""The actor that advances some populations of a network by chunks of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from q4_actors import Actor
from q4_snn.population import NonFiniteStateError
from q4_snn.stepper import Stepper
from q4core import Q4Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_actors import MutableTensor, Rings
    from q4_snn.stepper import Part, Plan, Trace

__all__ = ["COMMITTED", "DONE", "HALT", "POLL_S", "Chunk", "Worker"]

DONE, COMMITTED, HALT = "/done", "/committed", "/halt"
"""Rings of stamps alone: all populations have done these steps, and their rows were collected; all actors have
committed them; a chunk has failed."""
POLL_S = 0.5
"""Interval at which a waiting side checks that the others are alive."""


@attrs.frozen(eq=False)
class Chunk:
    """A message: the first step, counted from 1, how many, and where to write recorded states."""

    first: int
    count: int
    traces: tuple[Trace, ...] = ()

    @property
    def last(self) -> int:
        """The number of the last step."""
        return self.first + self.count - 1

    def places(self, slots: int) -> list[int]:
        """Return where the rows of its steps lie in a ring."""
        return [(step - 1) % slots for step in range(self.first, self.last + 1)]


class Worker(Actor):
    """Advances some populations by a chunk of steps for each message.

    States are in this actor's memory, and committed once all actors have done the chunk; so one that fails leaves that
    of the chunk's start to all. A message may come twice, after a restart or where others are late: steps go on from
    where they are, and after a restart from what was committed, to the same bits. An actor waits for others with a
    timeout, so that it can be stopped.

    Args:
        clock: The ring of its stamp.
        parts: Its populations, by the order of a step.
        tensors: Their states.
        rings: What all populations give.
        plan: Facts of the network.
    """

    def __init__(
        self, clock: str, parts: Mapping[str, Part], tensors: Mapping[str, MutableTensor], rings: Rings, plan: Plan
    ) -> None:
        self.clock, self.parts, self.tensors, self.rings, self.plan = clock, parts, tensors, rings, plan
        self.stepper = Stepper(parts, rings, plan)
        self.delays: dict[str, int] = {}
        for part in parts.values():
            for item in (shared.item for shared in part.into):
                if item.source not in parts:
                    self.delays[item.source] = min(item.delay, self.delays.get(item.source, item.delay))
        offsets = self.offsets = self.delays | {COMMITTED: plan.slots - plan.depth}
        """Ring → how many steps before a step it must be; nobody needs rows further back than the last one."""
        firing = [name for name in parts if plan.rows[name].is_binary]  # numbers come to their ring after the call
        self.turns = rings.turns(firing, offsets, POLL_S, stop=HALT)
        self.step: int | None = None
        self.error: Q4Error | None = None
        self.committed: dict[str, int] = {}

    def on_receive(self, message: Chunk | None) -> int | None:
        """Do a chunk, or what of it can be done now; for None, forget what is not committed, and return the clock.

        Raises:
            Q4Error: For None, what ended the last chunk.
        """
        if message is None:
            error, self.error, self.step = self.error, None, None
            self.rings.forget()
            if error is not None:
                raise error
            return min(self._read(name)[0] for name in self.parts)
        if not self.rings.stamp(HALT):
            try:
                with torch.no_grad():
                    self._receive(message)
            except Q4Error as error:
                self.error, self.step = error, None
                self.rings.publish(HALT, 1)
        return None

    def _receive(self, chunk: Chunk) -> None:
        if self.step is None and not self._load():
            return
        done = min(self.committed.values())
        if self.step is None or done >= chunk.last or done < chunk.first - 1:
            return  # it is committed, or the one before it is not, and comes again
        while self.step < chunk.last:
            last = self._advance(chunk)
            if last is None:
                return
            if last == chunk.last:
                self._check(chunk)
            for trace in chunk.traces:
                if trace.population in self.parts and trace.rings.stamp("trace") < last:
                    trace.rings.publish("trace", last, since=self.step)
            for name in self.parts:
                if self.rings.stamp(name) < last:  # else a predecessor has published the same
                    self.rings.publish(name, last, since=self.step)
            self.step = last
        self._commit(chunk.last)

    def _advance(self, chunk: Chunk) -> int | None:
        """Do steps of a chunk once their sources are there; return the last one; None where nothing could be done."""
        first = (self.step or 0) + 1
        if self.turns is not None:
            last = self.stepper.run_by_turns(first, chunk.last, chunk.traces, self.turns)
            if last is not None:
                return last if last >= first else None
        needs = {name: first - offset for name, offset in self.offsets.items() if first > offset}
        if not self._wait(needs):
            return None
        known = (self.rings.stamp(name) + offset for name, offset in self.offsets.items())
        last = min(chunk.last, first - 1 + self.plan.stride, *known)
        self.stepper.run(first, last, chunk.traces)
        return last

    def _wait(self, needs: Mapping[str, int]) -> bool:
        return self.rings.wait(needs, POLL_S, stop=HALT)

    def _check(self, chunk: Chunk) -> None:
        """Raise if a state is not finite after a chunk; the error says in which step it was first.

        Raises:
            NonFiniteStateError: So it is; nothing of the chunk is committed.
        """
        try:
            self._check_states(chunk.last)
        except NonFiniteStateError:
            if self._load():
                for step in range(min(self.committed.values()) + 1, chunk.last + 1):
                    self.stepper.run(step, step, ())
                    self._check_states(step)
            raise

    def _check_states(self, step: int) -> None:
        for name, part in self.parts.items():
            part.population.check_finite(self.stepper.states[name], step=step - 1)

    # -- the committed state

    def _commit(self, end: int) -> None:
        """Commit a chunk, once every population has done it and its rows were collected."""
        if not self._wait({DONE: end}):
            return
        for name, part in self.parts.items():
            if self.committed[name] < end:
                with self.tensors[name].write(wait=True, device=self.plan.side) as state:
                    part.layout.write(state, end, self.stepper.tensors(name), self.rings.rows(name))
                self.committed[name] = end
        self.rings.publish(self.clock, end)

    def _read(self, name: str) -> tuple[int, list[torch.Tensor]]:
        with self.tensors[name].read(device=self.plan.side) as seen:
            return self.parts[name].layout.read(seen.tensor)

    def _load(self) -> bool:
        """Begin with what was committed; False where what others gave is not there in time."""
        held = {name: self._read(name) for name in self.parts}
        self.committed = {name: clock for name, (clock, _) in held.items()}
        step = min(self.committed.values())
        self.rings.forget(max(0, step - self.plan.depth))
        for name, clock in self.committed.items():
            if self.rings.stamp(name) < clock:  # the first run after a checkpoint; or on Ray, where rows go with us
                with self.tensors[name].read(device=self.plan.side) as seen:
                    self.parts[name].layout.restore(seen.tensor, self.rings.rows(name))
                self.rings.publish(name, clock, since=max(0, clock - self.plan.depth))
        if not self._wait({name: step - delay for name, delay in self.delays.items() if step > delay}):
            return False
        self.stepper.load(held)
        self.step = step
        self.rings.publish(self.clock, step)
        return True
