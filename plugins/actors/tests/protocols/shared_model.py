"""A model of processes that share memory, and a search through all that their protocol can do.

Memory is weakly ordered: a location keeps all values that it ever had, each process knows how far it has seen each
location, and a load gives any value from there on. What a process knows grows by its own stores and loads, and when it
passes through the kernel's lock (every try of a lock and every letting go), where it leaves what it knows for the next.
At any instant any process may be killed, as often as ``kills`` says. A value is written in two halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "NOBODY",
    "Found",
    "Model",
    "Process",
    "Setting",
    "View",
    "World",
    "WrongError",
    "explore",
    "join",
    "put",
]

SLOTS = 3
HEALTHY, WRITING = 0, 1
NOBODY = -1
View: TypeAlias = "tuple[int, ...]"


@attrs.frozen
class Setting:
    """What to search through.

    Args:
        in_place: Which mode.
        writers: How many updates each writer makes.
        readers: How many reads each reader makes.
        watchers: Processes that look whether the writer has died (``IN_PLACE``).
        healers: Processes that reset (``IN_PLACE``).
        kills: How often any process may be killed.
        mortals: Which kinds of process may be.
        fault: What is wrong with the protocol, or nothing.
    """

    in_place: bool = False
    writers: tuple[int, ...] = (1,)
    readers: tuple[int, ...] = (1,)
    watchers: int = 0
    healers: int = 0
    kills: int = 1
    mortals: tuple[str, ...] = ("writer", "reader", "watcher", "healer")
    fault: str = ""


class Process(NamedTuple):
    """One process: what it does, how far it is, what it has seen of each location, and what it remembers."""

    kind: str
    step: str
    left: int
    view: View
    slot: int = 0
    version: int = 0
    floor: int = 0
    half: int = 0


class World(NamedTuple):
    """Everything. Location 0 is the word; 1 + 2 · slot and the next are a slot's halves. Lock 0 is the writer's."""

    values: tuple[tuple[int, ...], ...]
    exclusive: tuple[int, ...]
    shared: tuple[int, ...]
    kernel: View
    outside: View
    truth: tuple[int, ...]
    told: int
    kills: int
    dead: tuple[int, ...]
    processes: tuple[Process, ...]
    told_by: tuple[tuple[View, ...], ...] = ()
    """What whoever loads a value comes to know with it."""


@attrs.frozen
class Found:
    """What a search found.

    Args:
        problem: Nothing, ``"torn"``, ``"stale"``, ``"order"``, ``"stuck"`` or ``"false alarm"``.
        states: How many states were seen.
        steps: How the problem comes about.
    """

    problem: str
    states: int
    steps: tuple[str, ...]


class WrongError(Exception):
    """The protocol has failed."""


Step: TypeAlias = "Callable[[World, int], Iterator[World]]"


def join(one: View, other: View) -> View:
    """Return all that either knows."""
    return tuple(map(max, one, other))


def put(items: tuple, index: int, item: object) -> tuple:  # type: ignore[type-arg]  # of whatever
    """Return the items with another one in that place."""
    return (*items[:index], item, *items[index + 1 :])


class _Model:
    """The parts of a protocol's steps. A protocol adds the steps, each identified by its name: ``writer_begin``."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.fault = setting.fault
        self.slots = 1 if setting.in_place else SLOTS

    def start(self) -> World:
        view = (0,) * (1 + 2 * self.slots)
        kinds = [("writer", count) for count in self.setting.writers]
        kinds += [("reader", count) for count in self.setting.readers]
        kinds += [("watcher", 1)] * self.setting.watchers + [("healer", 1)] * self.setting.healers
        return World(
            values=((0,),) * len(view),
            exclusive=(NOBODY,) * (1 + self.slots),
            shared=(0,) * (1 + self.slots),
            kernel=view,
            outside=view,
            truth=(0,),
            told=0,
            kills=self.setting.kills,
            dead=(),
            processes=tuple(Process(kind, "begin", count, view) for kind, count in kinds),
        )

    # -- what a step can do

    def pass_kernel(self, world: World, index: int) -> World:
        if self.fault == "locks order nothing":
            return world
        known = join(world.kernel, world.processes[index].view)
        return world._replace(
            kernel=known, processes=put(world.processes, index, world.processes[index]._replace(view=known))
        )

    def may_take(self, world: World, lock: int, *, alone: bool) -> bool:
        return world.exclusive[lock] == NOBODY and not (alone and world.shared[lock])

    def take(self, world: World, index: int, lock: int, *, alone: bool) -> World:
        world = self.pass_kernel(world, index)
        if alone:
            return world._replace(exclusive=put(world.exclusive, lock, index))
        return world._replace(shared=put(world.shared, lock, world.shared[lock] | 1 << index))

    def let_go(self, world: World, index: int, lock: int) -> World:
        world = self.pass_kernel(world, index)
        if world.exclusive[lock] == index:
            world = world._replace(exclusive=put(world.exclusive, lock, NOBODY))
        return world._replace(shared=put(world.shared, lock, world.shared[lock] & ~(1 << index)))

    def load(self, world: World, index: int, location: int) -> Iterator[tuple[World, int]]:
        """Give what a load may give."""
        raise NotImplementedError

    def store(self, world: World, index: int, location: int, value: int) -> World:
        """Store a value."""
        raise NotImplementedError

    def go(self, world: World, index: int, step: str, **remembered: Any) -> World:
        process = world.processes[index]._replace(step=step, **remembered)
        return world._replace(processes=put(world.processes, index, process))

    def begin(self, world: World, index: int) -> World:
        """Begin an operation: it knows what all operations that have ended could have published."""
        process = world.processes[index]
        process = process._replace(view=join(process.view, world.outside), floor=world.told)
        return world._replace(processes=put(world.processes, index, process))

    def end(self, world: World, index: int, version: int) -> World:
        process = world.processes[index]
        left = process.left - 1
        after = Process(process.kind, "begin" if left else "done", left, process.view)
        return world._replace(
            outside=join(world.outside, process.view),
            told=max(world.told, version),
            processes=put(world.processes, index, after),
        )

    def publish(self, world: World, index: int, version: int, low: int) -> World:
        process = world.processes[index]
        if version != len(world.truth):
            raise WrongError("order")
        world = world._replace(truth=(*world.truth, process.half))
        return self.store(world, index, 0, version << 8 | low)

    def check(self, world: World, index: int, second: int) -> None:
        process = world.processes[index]
        if not process.half == second == world.truth[process.version]:
            raise WrongError("torn")
        if process.version < process.floor:
            raise WrongError("stale")

    def token(self, world: World, index: int) -> int:
        """Return a value that nobody else writes: each attempt has another."""
        return 1 + index + 8 * (world.processes[index].left + 4 * (self.setting.kills - world.kills))

    # -- every process

    def next_worlds(self, world: World) -> Iterator[tuple[str, World]]:
        for index, process in enumerate(world.processes):
            if process.step == "done":
                continue
            step: Step = getattr(self, f"{process.kind}_{process.step.replace(' ', '_')}")
            for after in step(world, index):
                yield f"{process.kind} {index}: {process.step}", after
            if world.kills and process.step != "begin" and process.kind in self.setting.mortals:
                yield f"{process.kind} {index}: killed at {process.step}", self.kill(world, index)

    def kill(self, world: World, index: int) -> World:
        """End the process, and restart its work as another process would."""
        process = world.processes[index]
        if world.values[0][-1] == process.version << 8 | WRITING and world.exclusive[1] == index:
            world = world._replace(dead=(*world.dead, process.version))
        if self.fault != "kill keeps locks":
            for lock in range(len(world.exclusive)):
                if world.exclusive[lock] == index or world.shared[lock] >> index & 1:
                    world = self.let_go(world, index, lock)
        fresh = Process(process.kind, "begin", process.left, world.outside)
        return world._replace(kills=world.kills - 1, processes=put(world.processes, index, fresh))

    # -- steps of both modes

    def writer_first_half(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        after = {
            "publish between halves": "publish",
            "mark after half": "mark",
            "healthy before half": "healthy" if self.setting.in_place else "second half",
        }.get(self.fault, "second half")
        yield self.go(self.store(world, index, 1 + 2 * process.slot, process.half), index, after)

    def writer_told_too_early(self, world: World, index: int) -> Iterator[World]:
        yield self.go(world._replace(told=max(world.told, world.processes[index].version + 1)), index, "publish")

    def reader_begin(self, world: World, index: int) -> Iterator[World]:
        begun = self.begin(world, index)
        if self.setting.in_place:
            yield self.go(begun, index, "hold in place")
        else:
            yield self.go(begun, index, "look")

    def reader_first_half(self, world: World, index: int) -> Iterator[World]:
        for seen, half in self.load(world, index, 1 + 2 * world.processes[index].slot):
            yield self.go(seen, index, "second half", half=half)


Model = _Model
"""For the protocols, which add their steps; these are identified by their names."""


def explore(setting: Setting, kind: type[Model]) -> Found:
    """Search every order of steps, every value that a load may give and every kill; stop at the first problem."""
    model = kind(setting)
    start = model.start()
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    before: dict[World, list[World]] = {}
    ended: list[World] = []
    open_worlds = [start]
    for world in open_worlds:  # which grows meanwhile: breadth first, so that the steps found are the fewest
        try:
            for step, after in model.next_worlds(world):
                if after not in came_from:
                    came_from[after] = (world, step)
                    open_worlds.append(after)
                if after.kills == world.kills:
                    before.setdefault(after, []).append(world)
        except WrongError as wrong:
            return Found(str(wrong), len(came_from), _steps(came_from, world))
        if all(process.step == "done" for process in world.processes):
            ended.append(world)
    stuck = _stuck(open_worlds, ended, before)
    if stuck is not None:
        return Found("stuck", len(came_from), _steps(came_from, stuck))
    return Found("", len(came_from), ())


def _stuck(worlds: list[World], ended: list[World], before: dict[World, list[World]]) -> World | None:
    """Return a world from which no steps, kills aside, lead to where all have done their work."""
    can_end = set(ended)
    while ended:
        for world in before.get(ended.pop(), ()):
            if world not in can_end:
                can_end.add(world)
                ended.append(world)
    return next((world for world in worlds if world not in can_end), None)


def _steps(came_from: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    steps = []
    while (origin := came_from[world]) is not None:
        world, step = origin
        steps.append(step)
    return tuple(reversed(steps))
