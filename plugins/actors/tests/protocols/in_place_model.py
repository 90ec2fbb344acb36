"""The protocol of atomics for ``IN_PLACE`` (``docs/memory-protocols.md``) as a model.

The memory is ``versioned_model``'s.

There is one slot. A writer whose turn it is sets a bar, waits until no row has a bit, marks the word, writes, publishes
and takes the bar away. A reader sets its bit and then looks for the bar; blocked, it looks whether who has the turn
is dead, and then ends that turn. Waking is left out: whoever waits looks again by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_model import HEALTHY, WRITING, Setting, World, WrongError, put
from versioned_model import CURRENT, MOST, TURN, VersionedModel, row_at, token_at

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FAULTS", "AfterDeathModel", "InPlaceModel"]

BAR = 3  # where the other model has a second slot

FAULTS = {
    "writer without fence": "false alarm",
    "reader without fence": "false alarm",
    "reader looks before its bit": "false alarm",
    "reader looks for no bar": "false alarm",
    "bar is looked at without acquire": "false alarm",
    "writer sets no bar": "false alarm",
    "writer looks at no row": "false alarm",
    "row of the living is cleared": "false alarm",
    "no mark": "torn",
    "mark after half": "torn",
    "reader looks at no state": "torn",
    "healthy between halves": "torn",
    "bar is gone between halves": "false alarm",
    "bar is gone without release": "false alarm",
    "bury without the turn": "false alarm",
    "reset heals at once": "torn",
    "bar is gone before healthy": "false alarm",
    "a look without acquire": "false alarm",
    "living writer is called dead": "false alarm",
    "no turn to write": "order",
    "turn of the living is taken": "order",
    "token is used again": "order",
    "turn of the dead stays": "stuck",
    "bar of the dead stays": "stuck",
    "turn is not let go": "stuck",
    "rows of the dead stay": "stuck",
}
"""Each with what must be found. A reader that gets in next to a writer gets the poison error before it can read."""


class InPlaceModel(VersionedModel):
    """The steps of one setting."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.count += setting.watchers + setting.healers

    def start(self) -> World:
        """Return the world in which all have their rows; without writers, a dead one has left the content unknown."""
        world = super().start()
        if self.setting.writers:
            return world
        return world._replace(values=put(world.values, CURRENT, (WRITING,)), dead=(0,))

    def kill(self, world: World, index: int) -> World:
        """End the process, and note whether it leaves the content unknown."""
        process = world.processes[index]
        has_marked = world.values[CURRENT][-1] == process.version << 8 | WRITING
        if has_marked and process.kind == "writer" and process.step in {"first half", "second half", "publish"}:
            world = world._replace(dead=(*world.dead, process.version))
        unknown = world.processes[index]._replace(version=-1)  # so that the locks' model does not judge it
        return super().kill(world._replace(processes=put(world.processes, index, unknown)), index)

    # -- the turn, of whoever wants it

    def healer_enter(self, world: World, index: int) -> Iterator[World]:
        """Take the row of the dead."""
        yield from self.enter(world, index)

    watcher_enter = healer_enter

    def writer_begin(self, world: World, index: int) -> Iterator[World]:
        """Begin an update."""
        after = "fence" if self.fault == "no turn to write" else "turn"
        yield self.go(self.begin(world, index), index, after, half=self.token(world, index))

    healer_begin = writer_begin
    healer_turn = VersionedModel.writer_turn
    healer_whose = VersionedModel.writer_whose
    healer_inherit = VersionedModel.writer_inherit

    def writer_fence(self, world: World, index: int) -> Iterator[World]:
        """Look at the state, now that no other process can change it."""
        is_healer = world.processes[index].kind == "healer"
        for seen, word in self.get(world, index, CURRENT):
            if (word & 255 == HEALTHY) is is_healer:
                yield self.go(seen, index, "give up")
                continue
            after = "mark" if self.fault == "writer sets no bar" else "bar"
            yield self.go(seen, index, after, version=word >> 8)

    healer_fence = writer_fence

    def writer_give_up(self, world: World, index: int) -> Iterator[World]:
        """Give back the turn, and the bar, which may be a dead one's."""
        if self.fault != "bar of the dead stays":
            world = self.set(world, index, BAR, 0)
        yield self.go(world, index, "end turn", version=-1)

    healer_give_up = writer_give_up

    # -- an update

    def writer_bar(self, world: World, index: int) -> Iterator[World]:
        """Keep new readers out."""
        barred = self.set(world, index, BAR, self.token_of(world, index))
        yield self.go(barred if self.fault == "writer without fence" else self.fence(barred, index), index, "scan")

    def writer_scan(self, world: World, index: int) -> Iterator[World]:
        """Look whether a row has its bit; those of the dead are emptied."""
        process = world.processes[index]
        first = "mark" if process.kind == "writer" else "first half"
        if self.fault in {"no mark", "mark after half"}:
            first = "first half"
        if self.fault == "reset heals at once" and process.kind == "healer":
            first = "publish"
        for seen, bits in self.rows(world, index):
            if not bits or self.fault == "writer looks at no row":
                yield self.go(seen, index, first)
            elif self.fault != "rows of the dead stay":
                yield self.go(seen, index, "reclaim")

    def writer_reclaim(self, world: World, index: int) -> Iterator[World]:
        """Empty the rows of the dead, and look again."""
        for row in range(self.count):
            if row != index and world.values[row_at(row)][-1]:
                world = self.clear(world, index, row) or world
        yield self.go(world, index, "scan")

    def writer_mark(self, world: World, index: int) -> Iterator[World]:
        """Say that it is being written."""
        version = world.processes[index].version
        marked = self.fence(self.set(world, index, CURRENT, version << 8 | WRITING), index)
        yield self.go(marked, index, "second half" if self.fault == "mark after half" else "first half")

    def writer_first_half(self, world: World, index: int) -> Iterator[World]:
        """Write to the one slot."""
        process = world.processes[index]
        after = {
            "mark after half": "mark",
            "healthy between halves": "publish",
            "bar is gone between halves": "unbar",
        }.get(self.fault, "second half")
        if process.kind == "healer":
            after = "second half"
        yield self.go(self.store(world, index, 1, process.half), index, after)

    def writer_second_half(self, world: World, index: int) -> Iterator[World]:
        """Write the rest."""
        process = world.processes[index]
        after = {
            "healthy between halves": "unbar",
            "bar is gone before healthy": "unbar",
        }.get(self.fault, "publish")
        if self.fault == "reset heals at once":
            after = "unbar" if process.kind == "healer" else "publish"
        yield self.go(self.store(world, index, 2, process.half), index, after)

    def writer_publish(self, world: World, index: int) -> Iterator[World]:
        """Store the word."""
        process = world.processes[index]
        after = {
            "healthy between halves": "second half",
            "bar is gone between halves": "end turn",
            "bar is gone before healthy": "end turn",
        }.get(self.fault, "unbar")
        if self.fault == "reset heals at once" and process.kind == "healer":
            after = "first half"
        yield self.go(self.publish(world, index, process.version + 1, HEALTHY), index, after)

    def writer_unbar(self, world: World, index: int) -> Iterator[World]:
        """Let readers in."""
        after = {"bar is gone between halves": "second half", "bar is gone before healthy": "publish"}
        freed = self.set(world, index, BAR, 0, release=self.fault != "bar is gone without release")
        yield self.go(freed, index, after.get(self.fault, "end turn"))

    healer_bar, healer_scan, healer_reclaim = writer_bar, writer_scan, writer_reclaim
    healer_first_half, healer_second_half = writer_first_half, writer_second_half
    healer_publish, healer_unbar, healer_end_turn = writer_publish, writer_unbar, VersionedModel.writer_end_turn

    # -- a read

    def reader_begin(self, world: World, index: int) -> Iterator[World]:
        """Begin a read."""
        yield self.go(self.begin(world, index), index, self.first_look())

    def first_look(self) -> str:
        """Return with what a reader begins, and restart."""
        return "bar first" if self.fault == "reader looks before its bit" else "bit"

    def reader_bit(self, world: World, index: int) -> Iterator[World]:
        """Set this process's bit."""
        seen, _ = self.newest(world, index, row_at(index))
        marked = self.set(seen, index, row_at(index), 1)
        after = {"reader without fence": "bar", "reader looks for no bar": "state"}.get(self.fault, "fence")
        yield self.go(marked, index, after)

    def reader_bar_first(self, world: World, index: int) -> Iterator[World]:
        """Look for the bar, and set the bit only then."""
        for seen, bar in self.get(world, index, BAR):
            if bar:
                yield self.go(seen, index, "kept out")
            else:
                yield self.go(self.fence(self.set(seen, index, row_at(index), 1), index), index, "state")

    def reader_fence(self, world: World, index: int) -> Iterator[World]:
        """Let the bit be seen by whoever looks for it from now on, or see that one's bar."""
        yield self.go(self.fence(world, index), index, "bar")

    def reader_bar(self, world: World, index: int) -> Iterator[World]:
        """Look for the bar."""
        for seen, bar in self.get(world, index, BAR, acquire=self.fault != "bar is looked at without acquire"):
            if bar:
                yield self.go(self.unset(seen, index, 0), index, "kept out")
            else:
                yield self.go(seen, index, "state")

    def reader_state(self, world: World, index: int) -> Iterator[World]:
        """Look at the state: is it known what is there?"""
        for seen, word in self.get(world, index, CURRENT):
            if word & 255 == HEALTHY or self.fault == "reader looks at no state":
                yield self.go(seen, index, "first half", version=word >> 8)
                continue
            if word >> 8 not in world.dead:
                raise WrongError("false alarm")
            yield self.end(self.unset(seen, index, 0), index, 0)

    def reader_second_half(self, world: World, index: int) -> Iterator[World]:
        """Have read all, and let go."""
        version = world.processes[index].version
        for seen, half in self.load(world, index, 2):
            self.check(seen, index, half)
            yield self.end(self.unset(seen, index, 0), index, version)

    # -- who has the turn, and is it dead?

    def reader_kept_out(self, world: World, index: int) -> Iterator[World]:
        """Restart once the bar is gone; meanwhile look who has the turn."""
        for seen, bar in self.get(world, index, BAR):
            if not bar:
                yield self.go(seen, index, self.first_look())
                continue
            for known, held in self.get(seen, index, TURN):
                if held and self.fault != "turn of the dead stays":
                    yield self.go(known, index, "whose", version=held)

    def reader_whose(self, world: World, index: int) -> Iterator[World]:
        """Look whether that one is dead."""
        for seen, is_dead in self.deaths(world, index, world.processes[index].version):
            yield self.go(seen, index, "bury" if is_dead else "kept out", **({} if is_dead else {"version": 0}))

    def deaths(self, world: World, index: int, held: int) -> Iterator[tuple[World, bool]]:
        """Give what looking at the row of whoever has the turn may give."""
        if self.fault == "turn of the living is taken":
            yield world, True
            return
        row = (held - 1) % MOST
        for seen, token in self.get(world, index, token_at(row)):
            cleared = None if token != held else self.clear(seen, index, row)
            yield (seen if cleared is None else cleared), token != held or cleared is not None

    def reader_bury(self, world: World, index: int) -> Iterator[World]:
        """Take the turn of the dead, unless somebody else has by now."""
        seen, held = self.newest(world, index, TURN)
        if self.fault == "bury without the turn":
            freed = self.set(self.set(seen, index, BAR, 0), index, TURN, 0)
            yield self.go(freed, index, self.after_burial(freed, index))
        elif held == world.processes[index].version:
            yield self.go(self.set(seen, index, TURN, self.token_of(world, index)), index, "bury bar")
        else:
            yield self.go(seen, index, self.after_burial(seen, index))

    def reader_bury_bar(self, world: World, index: int) -> Iterator[World]:
        """Take its bar away."""
        if self.fault != "bar of the dead stays":
            world = self.set(world, index, BAR, 0)
        yield self.go(world, index, "bury turn")

    def reader_bury_turn(self, world: World, index: int) -> Iterator[World]:
        """Give the turn back."""
        seen, held = self.newest(world, index, TURN)
        if held == self.token_of(world, index):
            seen = self.set(seen, index, TURN, 0)
        yield self.go(seen, index, self.after_burial(seen, index))

    def after_burial(self, world: World, index: int) -> str:
        """Return how whoever has buried goes on."""
        return "look again" if world.processes[index].kind == "watcher" else "kept out"

    watcher_bury, watcher_bury_bar, watcher_bury_turn = reader_bury, reader_bury_bar, reader_bury_turn

    # -- who only looks whether the content is known

    def watcher_begin(self, world: World, index: int) -> Iterator[World]:
        """Look at the word."""
        begun = self.begin(world, index)
        for seen, word in self.get(begun, index, CURRENT, acquire=self.fault != "a look without acquire"):
            if word & 255 == WRITING:
                yield self.go(seen, index, "who bars", slot=word >> 8)
            else:
                yield self.end(seen, index, 0)

    def watcher_who_bars(self, world: World, index: int) -> Iterator[World]:
        """Look whether somebody keeps readers out, and lives."""
        for seen, bar in self.get(world, index, BAR):
            if not bar or self.fault == "living writer is called dead":
                yield self.go(seen, index, "look again")
                continue
            for known, is_dead in self.deaths(seen, index, bar):
                yield self.go(known, index, "bury", version=bar) if is_dead else self.end(known, index, 0)

    def watcher_look_again(self, world: World, index: int) -> Iterator[World]:
        """Say that the writer has died, if the word is as it was."""
        version = world.processes[index].slot
        for seen, word in self.get(world, index, CURRENT):
            if word == version << 8 | WRITING and version not in world.dead:
                raise WrongError("false alarm")
            yield self.end(seen, index, 0)


class AfterDeathModel(InPlaceModel):
    """The same after a writer was killed before its first store: it has the turn, and its bar; its row is another's."""

    def start(self) -> World:
        """Return that world."""
        world = super().start()
        held = (1 + MOST * (MOST - 1),)  # a token of the first row that nobody has any more
        return world._replace(values=put(put(world.values, TURN, held), BAR, held))
