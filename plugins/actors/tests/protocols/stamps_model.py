"""The protocol of rings and stamps (``docs/memory-protocols.md``) as a model, searched through by ``shared_model``.

Two actors read each other's row of the step before, and a driver collects the rows of each chunk. Memory is weakly
ordered: a location holds all values that it ever had, a process knows how far it has seen each, and a load gives any
value from there on. A store with release order leaves what its process knows with the value, and a load with acquire
order takes it over. An actor that is killed begins with the state that it committed, and what its predecessor knew,
since the kernel ends one process and starts the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
from shared_model import View, WrongError, join, put

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FAULTS", "StampsModel", "StampsSetting"]

ACTORS = 2
DONE, COMMITTED = 2 * ACTORS, 2 * ACTORS + 1
ROWS = 2 * ACTORS + 2
"""Locations: the actors' stamps, their clocks, both of the driver's, then the rows."""
FAULTS = {
    "publish before the row": "torn",
    "publish without release": "torn",
    "wait without acquire": "torn",
    "no wait for the source": "torn",
    "no wait for who may read": "torn",
    "committed before all are": "torn",
    "begins with what it published": "stuck",
    "commits before all have done": "stuck",
    "clock is not published again": "stuck",
}
"""Each with what must be found."""


@attrs.frozen
class StampsSetting:
    """What to search through: steps, those of a chunk, slots of a ring, kills, and what is wrong, or nothing."""

    steps: int = 2
    chunk: int = 1
    slots: int = 2
    kills: int = 1
    fault: str = ""


class Party(NamedTuple):
    """An actor, or the driver: what it does next, the step that it is in, its state, and what it knows."""

    kind: str
    step: str
    at: int
    state: int
    view: View
    committed: int = 0


class RingWorld(NamedTuple):
    """Everything: each location's values, what came with each, kills that are left, and all parties."""

    values: tuple[tuple[int, ...], ...]
    told_by: tuple[tuple[View, ...], ...]
    kills: int
    processes: tuple[Party, ...]


class StampsModel:
    """The steps of one setting."""

    def __init__(self, setting: StampsSetting) -> None:
        self.setting, self.fault = setting, setting.fault
        self.count = ROWS + ACTORS * setting.slots

    def start(self) -> RingWorld:
        """Return the world before the first step."""
        view = (0,) * self.count
        parties = [Party("actor", "wait", 1, 0, view)] * ACTORS + [Party("driver", "collect", 0, 0, view)]
        return RingWorld(((0,),) * self.count, ((view,),) * self.count, self.setting.kills, tuple(parties))

    def next_worlds(self, world: RingWorld) -> Iterator[tuple[str, RingWorld]]:
        """Give what can come next."""
        for index, party in enumerate(world.processes):
            if party.step == "done":
                continue
            for after in getattr(self, f"{party.kind}_{party.step}")(world, index):
                yield f"{party.kind} {index}: {party.step} {party.at}", after
            if world.kills and party.kind == "actor":
                yield f"{party.kind} {index}: killed at {party.step} {party.at}", self.kill(world, index)

    # -- memory

    def load(self, world: RingWorld, index: int, place: int, *, acquire: bool) -> Iterator[tuple[RingWorld, int]]:
        """Give what a load may give."""
        before = world.processes[index].view
        for time in range(before[place], len(world.values[place])):
            view = put(before, place, time)
            yield self.go(world, index, view=join(view, world.told_by[place][time]) if acquire else view), time

    def reached(self, world: RingWorld, index: int, needs: dict[int, int]) -> Iterator[RingWorld]:
        """Give the worlds in which a wait for stamps has ended."""
        worlds = [world]
        for place, least in needs.items():
            worlds = [
                seen
                for one in worlds
                for seen, time in self.load(one, index, place, acquire=self.fault != "wait without acquire")
                if seen.values[place][time] >= least
            ]
        yield from worlds

    def store(self, world: RingWorld, index: int, place: int, value: int, *, release: bool) -> RingWorld:
        """Store a value."""
        view = put(world.processes[index].view, place, len(world.values[place]))
        told = view if release else (0,) * self.count
        world = world._replace(
            values=put(world.values, place, (*world.values[place], value)),
            told_by=put(world.told_by, place, (*world.told_by[place], told)),
        )
        return self.go(world, index, view=view)

    def publish(self, world: RingWorld, index: int, place: int, value: int) -> RingWorld:
        """Store a stamp."""
        return self.store(world, index, place, value, release=self.fault != "publish without release")

    def go(self, world: RingWorld, index: int, **facts: Any) -> RingWorld:
        """Return the world in which a party has changed."""
        return world._replace(processes=put(world.processes, index, world.processes[index]._replace(**facts)))

    def row(self, actor: int, step: int) -> int:
        """Return the location of a row."""
        return ROWS + actor * self.setting.slots + (step - 1) % self.setting.slots

    def check(self, world: RingWorld, index: int, actor: int, step: int) -> Iterator[RingWorld]:
        """Read a row, which must be that of the step."""
        for seen, time in self.load(world, index, self.row(actor, step), acquire=False):
            if seen.values[self.row(actor, step)][time] != step:
                raise WrongError("torn")
            yield seen

    # -- an actor

    def kill(self, world: RingWorld, index: int) -> RingWorld:
        """End an actor; its successor begins with what was committed."""
        party = world.processes[index]
        at = party.committed
        published = world.values[index][-1] if self.fault == "begins with what it published" else at
        fresh = party._replace(step="load", at=max(at, published) + 1, state=at)
        return world._replace(kills=world.kills - 1, processes=put(world.processes, index, fresh))

    def actor_load(self, world: RingWorld, index: int) -> Iterator[RingWorld]:
        """Publish the clock again, and go on with the step after it."""
        party = world.processes[index]
        if self.fault != "clock is not published again":
            world = self.publish(world, index, ACTORS + index, party.committed)
        yield self.go(world, index, step="wait" if party.at <= self.setting.steps else "done")

    def actor_wait(self, world: RingWorld, index: int) -> Iterator[RingWorld]:
        """Wait for the other's row, and for who may still read the row that is to be overwritten."""
        at = world.processes[index].at
        needs = {1 - index: at - 1, COMMITTED: at - (self.setting.slots - 1)}
        if self.fault == "no wait for the source":
            del needs[1 - index]
        if self.fault == "no wait for who may read":
            del needs[COMMITTED]
        for seen in self.reached(world, index, needs):
            yield self.go(seen, index, step="read" if at > 1 else "write")

    def actor_read(self, world: RingWorld, index: int) -> Iterator[RingWorld]:
        """Read the other's row of the step before."""
        for seen in self.check(world, index, 1 - index, world.processes[index].at - 1):
            yield self.go(seen, index, step="write")

    def actor_write(self, world: RingWorld, index: int) -> Iterator[RingWorld]:
        """Write the own row, unless a predecessor has published it."""
        party = world.processes[index]
        is_there = world.values[index][-1] >= party.at
        if self.fault == "publish before the row" and not is_there:
            world, is_there = self.publish(world, index, index, party.at), False
        if not is_there:
            world = self.store(world, index, self.row(index, party.at), party.state + 1, release=False)
        yield self.go(world, index, step="publish", state=party.state + 1)

    def actor_publish(self, world: RingWorld, index: int) -> Iterator[RingWorld]:
        """Publish the stamp, and go on."""
        party = world.processes[index]
        if world.values[index][-1] < party.at:
            world = self.publish(world, index, index, party.at)
        if party.at % self.setting.chunk:
            yield self.go(world, index, step="wait", at=party.at + 1)
        else:
            yield self.go(world, index, step="commit")

    def actor_commit(self, world: RingWorld, index: int) -> Iterator[RingWorld]:
        """Commit the state once all have done the chunk: an update of a tensor, which has a protocol of its own."""
        at = world.processes[index].at
        for seen in self.reached(world, index, {} if self.fault == "commits before all have done" else {DONE: at}):
            if self.fault == "commits before all have done" and seen.values[1 - index][-1] < at:
                raise WrongError("stuck")  # where the other fails, this one can't go back
            yield self.go(seen, index, step="say", committed=at)

    def actor_say(self, world: RingWorld, index: int) -> Iterator[RingWorld]:
        """Publish the clock."""
        at = world.processes[index].at
        world = self.publish(world, index, ACTORS + index, at)
        yield self.go(world, index, step="wait" if at < self.setting.steps else "done", at=at + 1)

    # -- the driver

    def driver_collect(self, world: RingWorld, index: int) -> Iterator[RingWorld]:
        """Wait until all have done a chunk, read its rows, and say so."""
        at = world.processes[index].at + self.setting.chunk
        for seen in self.reached(world, index, dict.fromkeys(range(ACTORS), at)):
            worlds = [seen]
            for actor in range(ACTORS):
                for step in range(at - self.setting.chunk + 1, at + 1):
                    worlds = [after for one in worlds for after in self.check(one, index, actor, step)]
            for one in worlds:
                yield self.go(self.publish(one, index, DONE, at), index, step="confirm", at=at)

    def driver_confirm(self, world: RingWorld, index: int) -> Iterator[RingWorld]:
        """Wait until all have committed it, and say so."""
        at = world.processes[index].at
        needs = {} if self.fault == "committed before all are" else dict.fromkeys(range(ACTORS, 2 * ACTORS), at)
        for seen in self.reached(world, index, needs):
            published = self.publish(seen, index, COMMITTED, at)
            yield self.go(published, index, step="collect" if at < self.setting.steps else "done")
