"""``Liveness``: checks which processes live, and releases what ended ones hold of a segment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_actors.tensors.form import ROWS
from q4_actors.tensors.segment import FIRST_ROW
from q4core import LifecycleError

if TYPE_CHECKING:
    from q4_actors._native import Core
    from q4_actors.tensors.file_locks import FileLocks

__all__ = ["Liveness"]


class Liveness:
    """Rows of the header, one for each handle, and the locks that prove whose they are.

    Args:
        cells: This process's part in the segment.
        locks: The segment's.
    """

    def __init__(self, cells: Core, locks: FileLocks) -> None:
        self._cells, self._locks = cells, locks

    def take_row(self, label: str) -> None:
        """Take a row, with the lock that proves that it is this process's."""
        for row in range(ROWS):
            if self._locks.try_exclusive(FIRST_ROW + row):
                self._cells.enter(row)
                return
        hint = "Close handles, or end processes that need them no more."
        raise LifecycleError(f"{label} has {ROWS} handles, and no room for more", hint=hint)

    def is_alive(self, holder: int) -> bool:
        """Return whether the process lives whose turn it was; the row of a dead one is emptied."""
        token, row = divmod(holder, ROWS)
        cells = self._cells
        return cells.token(row) == token and (row == cells.row or not self._clear_if_dead(row))

    def clear_dead_readers(self) -> bool:
        """Empty the rows of processes that have ended, and return whether there were any."""
        cells = self._cells
        reading = [row for row in range(cells.rows_used) if row != cells.row and cells.reads_any(row)]
        return any([self._clear_if_dead(row) for row in reading])  # noqa: C419  # all of them

    def inherit_turn(self) -> bool:
        """Take the turn to write from a process that has ended."""
        held = self._cells.turn
        return bool(held) and not self.is_alive(held) and self._cells.inherit_turn(held)

    def _clear_if_dead(self, row: int) -> bool:
        """Empty a row if its process has ended: its lock is free then."""
        if not self._locks.try_exclusive(FIRST_ROW + row):
            return False
        try:
            self._cells.clear(row)
        finally:
            self._locks.release(FIRST_ROW + row)
        return True
