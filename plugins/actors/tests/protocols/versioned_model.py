"""The protocol of atomics (``docs/memory-protocols.md``) as a model, searched through as ``shared_model`` does.

Here no lock orders memory while all live. A store with release order leaves what its process knows with the value, a
load with acquire order takes it over; a full fence exchanges what processes know, as the kernel's locks do; an atomic
change of a location finds the newest value. Without these a load may give any older value: so stores are buffered.

There are two slots, so that one reader of the older version keeps a writer waiting, and a dead one would forever. Each
process has a row, whose lock proves that it lives; who restarts after a kill takes the row of the dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_model import Model, Setting, View, World, join, put

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FAULTS", "VersionedModel"]

SLOTS = 2
CURRENT, TURN = 0, 1 + 2 * SLOTS
FIRST_ROW = TURN + 1
MOST = 8

FAULTS = {
    "publish before data": "torn",
    "publish between halves": "torn",
    "publish without release": "torn",
    "second look without acquire": "torn",
    "reader without fence": "torn",
    "writer without fence": "torn",
    "no second look": "torn",
    "second look before the bit": "torn",
    "writer looks at no row": "torn",
    "writer takes the slot in use": "torn",
    "row of the living is cleared": "torn",
    "no turn to write": "order",
    "turn without acquire": "order",
    "turn of the living is taken": "order",
    "token is used again": "order",
    "turn of the dead stays": "stuck",
    "turn is not let go": "stuck",
    "rows of the dead stay": "stuck",
    "row is entered as it is": "stuck",
    "ends before it publishes": "stale",
}
"""Each with what must be found."""


class VersionedModel(Model):
    """The steps of one setting."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.slots = SLOTS
        self.count = len(setting.writers) + len(setting.readers)

    def start(self) -> World:
        """Return the world in which all have their rows."""
        world = super().start()
        view = (0,) * (FIRST_ROW + 2 * self.count)
        values = [(0,)] * len(view)
        for index in range(self.count):
            values[token_at(index)] = (1 + index,)
        return world._replace(
            values=tuple(values),
            told_by=((view,),) * len(view),
            exclusive=tuple(range(self.count)),
            shared=(0,) * self.count,
            kernel=view,
            outside=view,
            processes=tuple(process._replace(view=view) for process in world.processes),
        )

    # -- memory

    def next_worlds(self, world: World) -> Iterator[tuple[str, World]]:
        """Give what can come next, without the values that nobody can load any more."""
        for step, after in super().next_worlds(world):
            yield step, compact(after)

    def get(self, world: World, index: int, location: int, *, acquire: bool = True) -> Iterator[tuple[World, int]]:
        """Give what a load may give."""
        before = world.processes[index].view
        for time in range(before[location], len(world.values[location])):
            view = put(before, location, time)
            if acquire:
                view = join(view, world.told_by[location][time])
            yield self.knowing(world, index, view), world.values[location][time]

    def set(self, world: World, index: int, location: int, value: int, *, release: bool = True) -> World:
        """Store a value."""
        view = put(world.processes[index].view, location, len(world.values[location]))
        told = view if release else (0,) * len(view)
        world = world._replace(
            values=put(world.values, location, (*world.values[location], value)),
            told_by=put(world.told_by, location, (*world.told_by[location], told)),
        )
        return self.knowing(world, index, view)

    def newest(self, world: World, index: int, location: int, *, acquire: bool = True) -> tuple[World, int]:
        """Load as the first half of an atomic change."""
        view = put(world.processes[index].view, location, len(world.values[location]) - 1)
        if acquire:
            view = join(view, world.told_by[location][-1])
        return self.knowing(world, index, view), world.values[location][-1]

    def store(self, world: World, index: int, location: int, value: int) -> World:
        """Store a part of the content, or publish."""
        release = location == CURRENT and self.fault != "publish without release"
        return self.set(world, index, location, value, release=release)

    def load(self, world: World, index: int, location: int) -> Iterator[tuple[World, int]]:
        """Load a part of the content."""
        return self.get(world, index, location, acquire=False)

    def fence(self, world: World, index: int) -> World:
        """Exchange what is known: one order of all fences."""
        return self.pass_kernel(world, index)

    def knowing(self, world: World, index: int, view: View) -> World:
        """Return the world in which a process knows so much."""
        return world._replace(processes=put(world.processes, index, world.processes[index]._replace(view=view)))

    # -- rows

    def token_of(self, world: World, index: int) -> int:
        """Return a living process's token, which it alone has stored last."""
        return world.values[token_at(index)][-1]

    def kill(self, world: World, index: int) -> World:
        """End the process; its successor must first have a row."""
        killed = super().kill(world, index)
        return self.go(killed, index, "enter")

    def enter(self, world: World, index: int) -> Iterator[World]:
        """Take the row of the dead."""
        if self.may_take(world, index, alone=True):
            world = self.take(world, index, index, alone=True)
            if self.fault != "row is entered as it is":
                world = self.set(world, index, row_at(index), 0)
            again = 0 if self.fault == "token is used again" else self.setting.kills - world.kills
            world = self.set(world, index, token_at(index), 1 + index + MOST * again)
            yield self.go(self.fence(world, index), index, "begin")

    writer_enter = enter

    def reader_enter(self, world: World, index: int) -> Iterator[World]:
        """Read again, or stop."""
        yield from self.enter(world, index)
        yield self.go(world, index, "done")

    def clear(self, world: World, index: int, row: int) -> World | None:
        """Empty the row of a dead process, or return None if it lives."""
        if self.fault == "row of the living is cleared" and world.exclusive[row] == row:
            return self.set(world, index, row_at(row), 0)
        if not self.may_take(world, row, alone=True):
            return None
        world = self.take(world, index, row, alone=True)
        world = self.set(world, index, row_at(row), 0)
        world = self.set(world, index, token_at(row), 0)
        return self.let_go(world, index, row)

    # -- the turn

    def writer_begin(self, world: World, index: int) -> Iterator[World]:
        """Begin an update."""
        begun = self.begin(world, index)
        after = "fence" if self.fault == "no turn to write" else "turn"
        yield self.go(begun, index, after, half=self.token(world, index))

    def writer_turn(self, world: World, index: int) -> Iterator[World]:
        """Take the turn if nobody has it; else remember who has."""
        seen, held = self.newest(world, index, TURN, acquire=self.fault != "turn without acquire")
        mine = self.token_of(world, index)
        if held in {0, mine}:
            yield self.go(self.set(seen, index, TURN, mine), index, "fence")
        elif self.fault != "turn of the dead stays":
            yield self.go(seen, index, "whose", version=held)

    def writer_whose(self, world: World, index: int) -> Iterator[World]:
        """Look whether the process that has the turn is gone, or has a row with a lock that nobody holds."""
        held = world.processes[index].version
        row = (held - 1) % MOST
        if self.fault == "turn of the living is taken":
            yield self.go(world, index, "inherit")
            return
        for seen, token in self.get(world, index, token_at(row)):
            if token != held:
                yield self.go(seen, index, "inherit")
                continue
            cleared = self.clear(seen, index, row)
            yield self.go(seen if cleared is None else cleared, index, "turn" if cleared is None else "inherit")

    def writer_inherit(self, world: World, index: int) -> Iterator[World]:
        """Take the turn of the dead, unless somebody else has by now."""
        seen, held = self.newest(world, index, TURN)
        if held == world.processes[index].version:
            yield self.go(self.set(seen, index, TURN, self.token_of(world, index)), index, "fence")
        else:
            yield self.go(seen, index, "turn")

    # -- an update

    def writer_fence(self, world: World, index: int) -> Iterator[World]:
        """Let what was published before be seen by whoever sets a bit from now on, or see that bit."""
        yield self.go(world if self.fault == "writer without fence" else self.fence(world, index), index, "scan")

    def writer_scan(self, world: World, index: int) -> Iterator[World]:
        """Find a slot that no row names."""
        first = "publish" if self.fault == "publish before data" else "first half"
        for seen, word in self.get(world, index, CURRENT):
            for known, held in self.rows(seen, index):
                free = [slot for slot in range(SLOTS) if not held >> slot & 1 and slot != word & 255]
                if self.fault == "writer looks at no row":
                    free = [1 - (word & 255)]
                if self.fault == "writer takes the slot in use":
                    free = [word & 255]
                for slot in free:
                    yield self.go(known, index, first, slot=slot, version=word >> 8)
                if not free and self.fault != "rows of the dead stay":
                    yield self.go(known, index, "reclaim")
                elif not free:
                    yield self.go(known, index, "fence")

    def rows(self, world: World, index: int) -> Iterator[tuple[World, int]]:
        """Give all that looking at each row may give."""
        found = [(world, 0)]
        for row in range(self.count):
            found = [(after, held | bits) for seen, held in found for after, bits in self.get(seen, index, row_at(row))]
        yield from found

    def writer_reclaim(self, world: World, index: int) -> Iterator[World]:
        """Empty the rows of the dead."""
        for row in range(self.count):
            if row != index and world.values[row_at(row)][-1]:
                world = self.clear(world, index, row) or world
        yield self.go(world, index, "fence")

    def writer_second_half(self, world: World, index: int) -> Iterator[World]:
        """Go on to publish."""
        process = world.processes[index]
        after = "publish"
        if self.fault in {"publish before data", "publish between halves"}:
            after = "end turn"
        if self.fault == "ends before it publishes":
            after = "told too early"
        yield self.go(self.store(world, index, 2 + 2 * process.slot, process.half), index, after)

    def writer_publish(self, world: World, index: int) -> Iterator[World]:
        """Store the word."""
        process = world.processes[index]
        after = {"publish before data": "first half", "publish between halves": "second half"}
        published = self.publish(world, index, process.version + 1, process.slot)
        yield self.go(published, index, after.get(self.fault, "end turn"))

    def writer_end_turn(self, world: World, index: int) -> Iterator[World]:
        """Give the turn back, if it is still this process's."""
        seen, held = self.newest(world, index, TURN)
        if held == self.token_of(world, index) and self.fault != "turn is not let go":
            seen = self.set(seen, index, TURN, 0)
        yield self.end(seen, index, world.processes[index].version + 1)

    # -- a read

    def reader_look(self, world: World, index: int) -> Iterator[World]:
        """Look which slot is the newest's."""
        for seen, word in self.get(world, index, CURRENT):
            after = "bit late" if self.fault == "second look before the bit" else "bit"
            yield self.go(seen, index, after, slot=word & 255, version=word >> 8)

    def reader_bit(self, world: World, index: int) -> Iterator[World]:
        """Set this process's bit of the slot."""
        seen, bits = self.newest(world, index, row_at(index))
        marked = self.set(seen, index, row_at(index), bits | 1 << world.processes[index].slot)
        after = "second look" if self.fault == "reader without fence" else "fence"
        yield self.go(marked, index, after)

    def reader_bit_late(self, world: World, index: int) -> Iterator[World]:
        """Look twice, and set the bit only then."""
        slot = world.processes[index].slot
        for seen, word in self.get(world, index, CURRENT):
            if word & 255 != slot:
                yield self.go(seen, index, "look")
                continue
            marked = self.set(seen, index, row_at(index), 1 << slot)
            yield self.go(self.fence(marked, index), index, "first half", version=word >> 8)

    def reader_fence(self, world: World, index: int) -> Iterator[World]:
        """Let the bit be seen by whoever looks for it from now on, or see what that one has published."""
        after = "first half" if self.fault == "no second look" else "second look"
        yield self.go(self.fence(world, index), index, after)

    def reader_second_look(self, world: World, index: int) -> Iterator[World]:
        """Look whether the slot is still the newest's."""
        slot = world.processes[index].slot
        for seen, word in self.get(world, index, CURRENT, acquire=self.fault != "second look without acquire"):
            if word & 255 == slot:
                yield self.go(seen, index, "first half", version=word >> 8)
            else:
                yield self.go(self.unset(seen, index, slot), index, "look")

    def unset(self, world: World, index: int, slot: int) -> World:
        """Clear this process's bit of the slot."""
        seen, bits = self.newest(world, index, row_at(index), acquire=False)
        return self.set(seen, index, row_at(index), bits & ~(1 << slot))

    def reader_second_half(self, world: World, index: int) -> Iterator[World]:
        """Have read all, and let go."""
        process = world.processes[index]
        for seen, half in self.load(world, index, 2 + 2 * process.slot):
            self.check(seen, index, half)
            yield self.end(self.unset(seen, index, process.slot), index, process.version)


def compact(world: World) -> World:
    """Drop what is older than all that anybody knows, so that worlds with other pasts and the same future are one."""
    views = [process.view for process in world.processes]
    least = tuple(map(min, world.outside, *views))
    if not any(least):
        return world

    def later(view: View) -> View:
        return tuple(max(0, time - oldest) for time, oldest in zip(view, least, strict=True))

    told_by = tuple(views[oldest:] for views, oldest in zip(world.told_by, least, strict=True))
    return world._replace(
        values=tuple(values[oldest:] for values, oldest in zip(world.values, least, strict=True)),
        told_by=tuple(tuple(map(later, views)) for views in told_by),
        kernel=later(world.kernel),
        outside=later(world.outside),
        processes=tuple(process._replace(view=later(process.view)) for process in world.processes),
    )


def row_at(index: int) -> int:
    """Return the location of a process's bits."""
    return FIRST_ROW + 2 * index


def token_at(index: int) -> int:
    """Return the location of the token of whose row it is."""
    return FIRST_ROW + 2 * index + 1
