"""What a plugin with atomics gives to ``SharedMutableTensor``, and how it is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from q4_actors.blocks import ReadView
    from q4_actors.rwlock import Thread

__all__ = ["Cells", "find_cells"]


class Cells(Protocol):
    """What one process holds of a segment. Every method returns at once, but those that wait."""

    reads: int
    """Read blocks that were left."""
    is_shut: bool
    """Whether ``read`` must ask before it lets anybody in."""
    file: int
    """What is mapped, open once more. A block begins with a look at its size: memory that is gone ends a process."""

    @property
    def open(self) -> int:
        """How many threads are in their read blocks."""

    @property
    def is_own(self) -> bool:
        """Whether this process has a row; a forked child has none of its parent's."""

    @property
    def row(self) -> int:
        """Which row it has, or had before a fork."""

    @property
    def copies_here(self) -> bool:
        """Whether ``begin_write`` copies contents of this size itself."""

    @property
    def turn(self) -> int:
        """Whose turn it is to write: token · rows + row, 0 for nobody's."""

    @property
    def rows_used(self) -> int:
        """One more than the last row that was ever used."""

    def read(self, content: object, timeout: float | None = None) -> ReadView:
        """Return a read block; it calls the content back when there is something to tell."""

    def enter(self, row: int) -> None:
        """Make a row this process's, which has its lock."""

    def after_fork(self) -> None:
        """Begin anew in a child."""

    def close(self) -> None:
        """Give everything back."""

    def is_reading(self, thread: Thread | None) -> bool:
        """Return whether the thread is in a read block."""

    def reclaim(self) -> int:
        """Put out readers whose threads have ended, and return how many."""

    def token(self, row: int) -> int:
        """Return whose row it is, 0 for nobody's."""

    def reads_any(self, row: int) -> bool:
        """Return whether a row's process reads."""

    def clear(self, row: int) -> None:
        """Empty a row whose process has ended, which the caller proves by its lock."""

    def begin_write(self, copies: bool, process: int) -> int:  # noqa: FBT001  # called by position, on the fast path
        """Take the turn and a free slot, and copy the newest version there if that is asked for.

        Returns:
            The slot, or a negative number if something is in the way, −4 if the file was cut short.
        """

    def try_turn(self) -> bool:
        """Take the turn to write, if nobody has it."""

    def inherit_turn(self, before: int) -> bool:
        """Take the turn from a process that has ended."""

    def end_turn(self) -> None:
        """Give the turn back."""

    def free_slot(self) -> int:
        """Return a slot that nobody reads, or −1."""

    def is_untouched(self, slot: int, version: int) -> bool:
        """Return whether no alias in this process has changed that version since it was first seen here."""

    def note(self, slot: int, version: int) -> None:
        """Take the slot for that version as it is now."""

    def end_write(self, slot: int) -> int:
        """Publish the slot and give the turn back.

        Returns:
            The version, or a negative number, and nothing is done, if the tensor is closed or poisoned.
        """

    def publish(self, slot: int) -> int:
        """Make what is in the slot the next version, and return its number."""

    # -- where there is one slot, ``IN_PLACE``

    @property
    def current(self) -> int:
        """The word of version and state, with all that was stored before it."""

    @property
    def barred(self) -> int:
        """Which writer keeps readers out, as ``turn`` says it; 0 for none."""

    @property
    def has_turn(self) -> bool:
        """Whether it is this process's turn to write."""

    @property
    def is_holding(self) -> bool:
        """Whether this process reads, so that nobody writes."""

    @property
    def is_marked(self) -> bool:
        """Whether an update of this process is under way, as far as the header says."""

    @property
    def has_published(self) -> bool:
        """Whether this process has published since it last tried to get the turn."""

    def hold_in_turn(self, again: bool) -> bool:  # noqa: FBT001  # called by position, on the fast path
        """Hold the slot for blocks that the caller counts, unless it is barred; ``again``: by a thread that reads."""

    def let_go(self) -> None:
        """Let those blocks go, if they hold it."""

    def say_kept_out(self, is_any: bool) -> None:  # noqa: FBT001  # as above
        """Say whether readers of this process wait for a writer to end."""

    def keeps_out(self) -> bool:
        """Return whether readers of any process wait so."""

    def is_readers_turn(self) -> bool:
        """Return whether an update ended so lately that those whom it kept out go first."""

    def begin_in_place(self, process: int) -> int:
        """Take the turn and the slot, and mark it as being written.

        Returns:
            0; or a negative number if something is in the way: −2 for readers, and then new ones are kept out; −4 if
            the file was cut short.
        """

    def end_in_place(self) -> int:
        """Publish and give the turn back; a negative number, and nothing is done, if it is closed or poisoned."""

    def claim(self) -> bool:
        """Keep new readers out, and return whether none are left."""

    def mark(self) -> None:
        """Say that the content is being written."""

    def unmark(self) -> None:
        """Take that back, if it was said and nothing was written."""

    def poison(self) -> None:
        """Say that the content is unknown."""

    def bury(self, dead: int) -> None:
        """End the turn of a process that has ended."""

    def wait_bar(self, seconds: float) -> None:
        """Sleep until no writer keeps readers out, or for so long."""

    def wait_readers(self, seconds: float) -> None:
        """Sleep until a process has ended its reads, or for so long."""

    def wait_kept_out(self, seconds: float) -> None:
        """Sleep until readers that waited are in, or for so long."""

    # -- waiting, both modes

    def wait(self, known: int, seconds: float) -> None:
        """Sleep until the word is another than this one, or for so long."""

    def wait_turn(self, seconds: float) -> None:
        """Sleep until the turn to write is another's or nobody's, or for so long."""

    def wake(self) -> None:
        """Wake everybody who waits for a version."""


def find_cells() -> Any:
    """Return the extension module's, or None without it."""
    try:
        from q4_actors import _native  # noqa: PLC0415  # optional
    except ImportError:
        return None
    return _native.Core
