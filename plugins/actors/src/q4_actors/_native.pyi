# ruff: noqa: PYI021  # here stands what each method promises; the C++ says how
"""The extension module: the atomics by which processes agree. ``docs/memory-protocols.md`` states the protocol."""

import mmap

import torch

from q4_actors.tensors.blocks import ReadView
from q4_actors.tensors.tickets import Thread

ROWS: int
"""For how many handles a header has room."""

class Stamps:
    """Numbers in shared memory, each with one writer and a line of its own; ``native/src/stamps.hpp`` says how."""

    def __init__(self, address: int, count: int, /) -> None: ...
    def value(self, which: int, /) -> int:
        """Return a stamp, with all that was stored before it."""
    def publish(self, which: int, value: int, /) -> None:
        """Store a stamp, after all that was stored before, and wake those who wait for it."""
    def wait(self, needs: list[tuple[int, int]], stop: int, seconds: float, /) -> int:
        """Wait until each stamp has at least its number, without the GIL where it is not there yet.

        Returns:
            1 if so, 0 if the time ran out, 2 if the stamp ``stop``, −1 for none, is not 0.
        """

    def turns(self, own: list[int], needs: list[tuple[int, int]], stop: int, seconds: float, /) -> Turns:
        """Return turns by which steps of one call wait and publish; the memory must live as long.

        Args:
            own: Stamps to publish after each step.
            needs: Stamps, and how many steps before the next one each must be.
            stop: As of ``wait``.
            seconds: How long a step waits at most.
        """

class Turns:
    """What is done between steps: what the last one gave is published, what the next one needs is awaited."""

    address: tuple[int, int]
    """Of ``Turns::call`` and of this: a function of C and its context."""

    def begin(self, first: int, /) -> None:
        """Say which step, counted from 1, the next round 0 is."""
    def __call__(self, number: int, rounds: int, /) -> bool:
        """Return whether a round can be done: not where needs came late, or the stamp ``stop`` is not 0."""

class Core:
    """What one process holds of a segment. Every method returns at once, but those that wait."""

    reads: int
    """Read blocks that were left."""
    is_shut: bool
    """Whether ``read`` must ask before it lets anybody in."""
    file: int
    """What is mapped, open once more. A block begins with a look at its size: memory that is gone ends a process."""

    def __init__(
        self, memory: mmap.mmap, slots: list[torch.Tensor], here: object, content_bytes: int, file: int, /
    ) -> None: ...

    # -- facts

    @property
    def open(self) -> int:
        """How many threads are in read blocks that did not wait."""
    @property
    def is_own(self) -> bool:
        """Whether this process has a row; a forked child has none of its parent's."""
    @property
    def row(self) -> int:
        """Which row it has, or had before a fork."""
    @property
    def rows_used(self) -> int:
        """One more than the last row that was ever used."""
    @property
    def turn(self) -> int:
        """Whose turn it is to write: token · rows + row, 0 for nobody's."""
    @property
    def has_turn(self) -> bool:
        """Whether it is this process's turn to write."""
    @property
    def barred(self) -> int:
        """Which writer keeps readers out, as ``turn`` says it; 0 for none. ``IN_PLACE``, as the next three."""
    @property
    def is_holding(self) -> bool:
        """Whether this process reads, so that nobody writes."""
    @property
    def current(self) -> int:
        """The word of version and state, with all that was stored before it."""
    @property
    def copies_here(self) -> bool:
        """Whether ``begin`` copies contents of this size itself."""

    # -- this process's row, and those of others

    def enter(self, row: int) -> None:
        """Make a row this process's, which has its lock."""
    def after_fork(self) -> None:
        """Begin anew in a child."""
    def close(self) -> None:
        """Give everything back."""
    def token(self, row: int) -> int:
        """Return whose row it is, 0 for nobody's."""
    def reads_any(self, row: int) -> bool:
        """Return whether a row's process reads."""
    def clear(self, row: int) -> None:
        """Empty a row whose process has ended, which the caller proves by its lock."""

    # -- reading

    def read(self, protocol: object, timeout: float | None = None) -> ReadView:
        """Return a read block; it calls the protocol where there is more to do than to read."""
    def is_reading(self, thread: Thread) -> bool:
        """Return whether the thread is in a read block that did not wait."""
    def reclaim(self) -> int:
        """Evict readers whose threads have ended, and return how many."""
    def is_untouched(self, slot: int, version: int) -> bool:
        """Return whether no alias in this process has changed that version since it was first seen here."""
    def hold_in_turn(self, again: bool) -> bool:
        """Hold the slot for blocks that the caller counts, unless it is barred; ``again``: by a thread that reads."""
    def release(self) -> None:
        """End that hold, if there is one."""
    def say_kept_out(self, is_any: bool) -> None:
        """Say whether readers of this process wait for a writer to end."""
    def keeps_out(self) -> bool:
        """Return whether readers of any process wait so."""
    def is_readers_turn(self) -> bool:
        """Return whether an update ended so lately that those whom it kept out go first."""

    # -- writing

    def begin(self, copies: bool, heals: bool, yields: bool, process: int) -> int:
        """Take the turn and a slot, and copy the newest version there if that is asked for.

        Args:
            copies: Whether the update begins with the newest version.
            heals: Whether it is for poisoned content, or for healthy.
            yields: Whether readers that were kept out go first.
            process: Whom to name to others.

        Returns:
            The slot, or what is in the way: ``TAKEN`` … ``READERS_FIRST`` of ``turns``.
        """
    def end(self, slot: int, heals: bool) -> int:
        """Publish the slot and give the turn back.

        Returns:
            The version, or a negative number, and nothing is done, if the tensor is closed, or poisoned meanwhile.
        """
    def unmark(self) -> None:
        """Take back that the content is being written, if that was said and nothing was written."""
    def poison(self) -> None:
        """Say that the content is unknown."""
    def end_turn(self) -> None:
        """Give the turn back, if this process has it."""
    def inherit_turn(self, before: int) -> bool:
        """Take the turn from a process that has ended."""
    def bury(self, dead: int) -> None:
        """End the turn of a process that has ended."""

    # -- waiting: until something has changed, or for so long

    def wait(self, known: int, seconds: float) -> None:
        """Sleep until the word of version and state is another than this one."""
    def wait_turn(self, seconds: float) -> None:
        """Sleep until the turn to write is another's or nobody's."""
    def wait_bar(self, seconds: float) -> None:
        """Sleep until no writer keeps readers out."""
    def wait_readers(self, seconds: float) -> None:
        """Sleep until a process has ended its reads."""
    def wait_kept_out(self, seconds: float) -> None:
        """Sleep until readers that waited are in."""
    def wake(self) -> None:
        """Wake everybody who waits for a version."""
