"""The protocol between processes (``docs/memory-protocols.md``) as a model, and a search through all that it can do.

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
    "FAULTS_IN_PLACE",
    "FAULTS_VERSIONED",
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

FAULTS_VERSIONED = {
    "publish before data": "torn",
    "publish between halves": "torn",
    "reader holds no slot": "torn",
    "no second look": "torn",
    "writer asks for no slot": "torn",
    "writer takes the slot in use": "torn",
    "no turn to write": "order",
    "locks order nothing": "torn",
    "kill keeps locks": "stuck",
    "turn is not let go": "stuck",
    "ends before it publishes": "stale",
}
"""Each with what must be found."""
FAULTS_IN_PLACE = {
    "no mark": "torn",
    "mark after half": "torn",
    "healthy before half": "torn",
    "reader holds no slot": "torn",
    "reader looks at no state": "torn",
    "writer asks for no slot": "torn",
    "locks order nothing": "torn",
    "kill keeps locks": "stuck",
    "reset heals at once": "torn",
    "slot let go before healthy": "false alarm",
    "a look is enough": "false alarm",
}


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
    """With atomics: what whoever loads a value comes to know with it."""


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
    """The steps of one setting."""

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
        process = world.processes[index]
        values = world.values[location]
        for time in range(process.view[location], len(values)):
            seen = process._replace(view=put(process.view, location, time))
            yield world._replace(processes=put(world.processes, index, seen)), values[time]

    def store(self, world: World, index: int, location: int, value: int) -> World:
        process = world.processes[index]
        values = (*world.values[location], value)
        seen = process._replace(view=put(process.view, location, len(values) - 1))
        return world._replace(values=put(world.values, location, values), processes=put(world.processes, index, seen))

    def go(self, world: World, index: int, step: str, **remembered: Any) -> World:
        process = world.processes[index]._replace(step=step, **remembered)
        return world._replace(processes=put(world.processes, index, process))

    def begin(self, world: World, index: int) -> World:
        """Begin an operation: who does it knows whatever those who have ended one could have told it."""
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
        """End the process, and begin its work anew as another process would."""
        process = world.processes[index]
        if world.values[0][-1] == process.version << 8 | WRITING and world.exclusive[1] == index:
            world = world._replace(dead=(*world.dead, process.version))
        if self.fault != "kill keeps locks":
            for lock in range(len(world.exclusive)):
                if world.exclusive[lock] == index or world.shared[lock] >> index & 1:
                    world = self.let_go(world, index, lock)
        fresh = Process(process.kind, "begin", process.left, world.outside)
        return world._replace(kills=world.kills - 1, processes=put(world.processes, index, fresh))

    # -- writers, both modes

    def writer_begin(self, world: World, index: int) -> Iterator[World]:
        if self.fault == "no turn to write" or self.may_take(world, 0, alone=True):
            world = self.begin(world, index)
            if self.fault != "no turn to write":
                world = self.take(world, index, 0, alone=True)
            yield self.go(
                world, index, "claim in place" if self.setting.in_place else "claim", half=self.token(world, index)
            )

    def writer_claim(self, world: World, index: int) -> Iterator[World]:
        first = {"publish before data": "publish"}.get(self.fault, "first half")
        for seen, word in self.load(world, index, 0):
            current = word & 255
            for slot in range(self.slots):
                if slot == current and self.fault != "writer takes the slot in use":
                    continue
                if self.fault == "writer asks for no slot":
                    yield self.go(seen, index, first, slot=slot, version=word >> 8)
                elif self.may_take(seen, 1 + slot, alone=True):
                    held = self.take(seen, index, 1 + slot, alone=True)
                    yield self.go(held, index, first, slot=slot, version=word >> 8)

    def writer_first_half(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        after = {
            "publish between halves": "publish",
            "mark after half": "mark",
            "healthy before half": "healthy" if self.setting.in_place else "second half",
        }.get(self.fault, "second half")
        yield self.go(self.store(world, index, 1 + 2 * process.slot, process.half), index, after)

    def writer_second_half(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        after = "healthy" if self.setting.in_place else "let slot go"
        if self.fault in {"publish before data", "publish between halves", "healthy before half"}:
            after = "let all go"
        if self.fault == "slot let go before healthy":
            after = "let slot go"
        yield self.go(self.store(world, index, 2 + 2 * process.slot, process.half), index, after)

    def writer_let_slot_go(self, world: World, index: int) -> Iterator[World]:
        after = "healthy" if self.setting.in_place else "publish"
        if self.fault == "ends before it publishes":
            after = "told too early"
        yield self.go(self.let_go(world, index, 1 + world.processes[index].slot), index, after)

    def writer_told_too_early(self, world: World, index: int) -> Iterator[World]:
        yield self.go(world._replace(told=max(world.told, world.processes[index].version + 1)), index, "publish")

    def writer_publish(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        after = {"publish before data": "first half", "publish between halves": "second half"}.get(
            self.fault, "let all go"
        )
        if self.fault == "publish before data" and world.values[1 + 2 * process.slot][-1] == process.half:
            after = "let all go"
        yield self.go(self.publish(world, index, process.version + 1, process.slot), index, after)

    def writer_let_all_go(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        if world.exclusive[1 + process.slot] == index:
            yield self.go(self.let_go(world, index, 1 + process.slot), index, "let all go")
        else:
            if self.fault != "turn is not let go":
                world = self.let_go(world, index, 0)
            yield self.end(world, index, process.version + 1)

    # -- VERSIONED readers

    def reader_begin(self, world: World, index: int) -> Iterator[World]:
        begun = self.begin(world, index)
        if self.setting.in_place:
            yield self.go(begun, index, "hold in place")
        else:
            yield self.go(begun, index, "look")

    def reader_look(self, world: World, index: int) -> Iterator[World]:
        after = "first half" if self.fault == "reader holds no slot" else "hold"
        for seen, word in self.load(world, index, 0):
            yield self.go(seen, index, after, slot=word & 255, version=word >> 8)

    def reader_hold(self, world: World, index: int) -> Iterator[World]:
        slot = world.processes[index].slot
        if self.may_take(world, 1 + slot, alone=False):
            after = "first half" if self.fault == "no second look" else "second look"
            yield self.go(self.take(world, index, 1 + slot, alone=False), index, after)
        else:
            yield self.go(self.pass_kernel(world, index), index, "look")

    def reader_second_look(self, world: World, index: int) -> Iterator[World]:
        slot = world.processes[index].slot
        for seen, word in self.load(world, index, 0):
            if word & 255 == slot:
                yield self.go(seen, index, "first half", version=word >> 8)
            else:
                yield self.go(self.let_go(seen, index, 1 + slot), index, "look")

    def reader_first_half(self, world: World, index: int) -> Iterator[World]:
        for seen, half in self.load(world, index, 1 + 2 * world.processes[index].slot):
            yield self.go(seen, index, "second half", half=half)

    def reader_second_half(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        for seen, half in self.load(world, index, 2 + 2 * process.slot):
            self.check(seen, index, half)
            yield self.end(self.let_go(seen, index, 1 + process.slot), index, process.version)

    # -- IN_PLACE

    def writer_claim_in_place(self, world: World, index: int) -> Iterator[World]:
        if self.fault == "writer asks for no slot":
            yield self.go(world, index, "state")
        elif self.may_take(world, 1, alone=True):
            yield self.go(self.take(world, index, 1, alone=True), index, "state")

    def writer_state(self, world: World, index: int) -> Iterator[World]:
        after = "first half" if self.fault in {"no mark", "mark after half"} else "mark"
        for seen, word in self.load(world, index, 0):
            if word & 255 == HEALTHY:
                yield self.go(seen, index, after, version=word >> 8)
            else:
                yield self.give_up(seen, index)

    def give_up(self, world: World, index: int) -> World:
        for lock in (1, 0):
            world = self.let_go(world, index, lock)
        return self.end(world, index, 0)

    def writer_mark(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        after = "second half" if self.fault == "mark after half" else "first half"
        yield self.go(self.store(world, index, 0, process.version << 8 | WRITING), index, after)

    def writer_healthy(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        after = "second half" if self.fault == "healthy before half" else "let all go"
        yield self.go(self.publish(world, index, process.version + 1, HEALTHY), index, after)

    def reader_hold_in_place(self, world: World, index: int) -> Iterator[World]:
        if self.fault == "reader holds no slot":
            yield self.go(world, index, "state")
        elif self.may_take(world, 1, alone=False):
            yield self.go(self.take(world, index, 1, alone=False), index, "state")

    def reader_state(self, world: World, index: int) -> Iterator[World]:
        for seen, word in self.load(world, index, 0):
            if word & 255 == HEALTHY or self.fault == "reader looks at no state":
                yield self.go(seen, index, "first half", version=word >> 8)
            else:  # it is told of poison
                yield self.end(self.let_go(seen, index, 1), index, 0)

    def healer_begin(self, world: World, index: int) -> Iterator[World]:
        if self.may_take(world, 0, alone=True):
            world = self.take(self.begin(world, index), index, 0, alone=True)
            yield self.go(world, index, "claim", half=self.token(world, index))

    def healer_claim(self, world: World, index: int) -> Iterator[World]:
        if self.may_take(world, 1, alone=True):
            yield self.go(self.take(world, index, 1, alone=True), index, "state")

    def healer_state(self, world: World, index: int) -> Iterator[World]:
        for seen, word in self.load(world, index, 0):
            if word & 255 == HEALTHY:
                yield self.give_up(seen, index)
            else:
                after = "healthy" if self.fault == "reset heals at once" else "first half"
                yield self.go(seen, index, after, version=word >> 8)

    def healer_first_half(self, world: World, index: int) -> Iterator[World]:
        yield self.go(self.store(world, index, 1, world.processes[index].half), index, "second half")

    def healer_second_half(self, world: World, index: int) -> Iterator[World]:
        after = "let all go" if self.fault == "reset heals at once" else "healthy"
        yield self.go(self.store(world, index, 2, world.processes[index].half), index, after)

    def healer_healthy(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        after = "first half" if self.fault == "reset heals at once" else "let all go"
        yield self.go(self.publish(world, index, process.version + 1, HEALTHY), index, after)

    def healer_let_all_go(self, world: World, index: int) -> Iterator[World]:
        version = world.processes[index].version + 1
        yield self.end(self.let_go(self.let_go(world, index, 1), index, 0), index, version)

    def watcher_begin(self, world: World, index: int) -> Iterator[World]:
        for seen, word in self.load(self.begin(world, index), index, 0):
            if word & 255 == WRITING:
                yield self.go(seen, index, "is it free", version=word >> 8)
            else:
                yield self.end(seen, index, 0)

    def watcher_is_it_free(self, world: World, index: int) -> Iterator[World]:
        """To look at a lock orders nothing."""
        if world.exclusive[1] != NOBODY:
            yield self.end(world, index, 0)
        else:
            yield self.go(world, index, "look again" if self.fault == "a look is enough" else "pass")

    def watcher_pass(self, world: World, index: int) -> Iterator[World]:
        if self.may_take(world, 1, alone=False):
            yield self.go(self.pass_kernel(world, index), index, "look again")
        else:
            yield self.end(self.pass_kernel(world, index), index, 0)

    def watcher_look_again(self, world: World, index: int) -> Iterator[World]:
        process = world.processes[index]
        for seen, word in self.load(world, index, 0):
            if word == process.version << 8 | WRITING and process.version not in world.dead:
                raise WrongError("false alarm")
            yield self.end(seen, index, 0)


Model = _Model
"""For protocols that differ in part; its steps are told by their names."""


def explore(setting: Setting, kind: type[Model] = Model) -> Found:
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
