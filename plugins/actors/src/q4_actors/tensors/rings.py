"""``Rings``: rows that actors publish by stamps, in memory that threads or processes share.

A ring has one writer, any number of readers, and a stamp: how many rows it has had. Who sees a stamp sees the rows up
to it; the n-th lies at ``(n - 1) % slots``. Writers keep within ``slots`` rows of who still reads, which readers say by
stamps of their own: those of rings without words. ``docs/memory-protocols.md`` states the protocol.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_actors.tensors.arguments import MutableMode
from q4_actors.tensors.form import Form
from q4_actors.tensors.segment import Segment
from q4core import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["RingForm", "Rings", "SharedRings"]

_LATE, _REACHED, _STOPPED = range(3)
_LINE = 8
"""Words of a stamp: a cache line, as ``native/src/stamps.hpp`` has it."""


@attrs.frozen
class RingForm:
    """A ring's slots, and the 64-bit words of each; 0 words for a stamp alone."""

    slots: int = 0
    words: int = 0


class Rings:
    """Rings by name, for the threads of this process.

    Args:
        forms: Name → form.
    """

    def __init__(self, forms: Mapping[str, RingForm]) -> None:
        self.forms = dict(forms)
        self._places = {name: index for index, name in enumerate(self.forms)}
        total = sum(_LINE + form.slots * form.words for form in self.forms.values())
        self._memory = self._make(total)
        starts, at = {}, _LINE * len(self.forms)
        for name, form in self.forms.items():
            starts[name], at = at, at + form.slots * form.words
        self._rows = {
            name: self._memory[starts[name] : starts[name] + form.slots * form.words].view(form.slots, form.words)
            for name, form in self.forms.items()
        }
        self._stamps = _stamps_over(self._memory, len(self.forms))

    def _make(self, total: int) -> torch.Tensor:
        lines = torch.zeros(total + _LINE, dtype=torch.int64, device="cpu")
        first = -lines.data_ptr() % (8 * _LINE) // 8  # stamps of their own lines
        return lines[first : first + total]

    def rows(self, name: str) -> torch.Tensor:
        """Return a ring's rows, int64 [slots, words], to be read up to its stamp, and written by its writer alone."""
        return self._rows[name]

    def stamp(self, name: str) -> int:
        """Return the number of the last row that is there, or was here when this process's copy was made."""
        return int(self._stamps.value(self._places[name]))

    def publish(self, name: str, stamp: int, *, since: int = 0) -> None:  # noqa: ARG002  # where memory is not shared
        """Publish the rows after ``since`` up to a number. A ring without words may take a smaller one again."""
        self._stamps.publish(self._places[name], stamp)

    def wait(self, needs: Mapping[str, int], timeout: float, *, stop: str | None = None, rows: bool = True) -> bool:  # noqa: ARG002  # where memory is not shared
        """Wait until rings have rows up to a number.

        Args:
            needs: Name → number.
            timeout: Seconds.
            stop: Name of a ring whose stamp ends the wait where it is not 0.
            rows: Whether rows are to be read, or the numbers are enough.

        Returns:
            Whether they have; else the time ran out, or the wait was ended.
        """
        wanted = [(self._places[name], least) for name, least in needs.items()]
        place = -1 if stop is None else self._places[stop]
        return bool(self._stamps.wait(wanted, place, timeout) == _REACHED)

    def turns(self, own: Iterable[str], needs: Mapping[str, int], timeout: float, *, stop: str) -> Any:
        """Return what waits and publishes between steps that one native call computes, None where nothing can.

        Args:
            own: Names of rings that each step publishes.
            needs: Name → how many steps before its own a step reads.
            timeout: Seconds that a step waits at most; the run ends then.
            stop: Name of a ring whose stamp ends the run where it is not 0.

        Returns:
            ``Turns`` of the extension module: ``begin`` says which step is the first of a run.
        """
        if isinstance(self._stamps, _ThreadStamps):
            return None
        places = self._places
        wanted = [(places[name], back) for name, back in needs.items()]
        return self._stamps.turns([places[name] for name in own], wanted, places[stop], timeout)

    def rewind(self, stamp: int) -> None:
        """Set back every ring that has more rows, while no other thread uses it."""
        for name in self.forms:
            if self.stamp(name) > stamp:
                self._stamps.publish(self._places[name], stamp)

    def forget(self, unused: int = 0) -> None:
        """Drop what this process has copied of rings, of which it needs no row up to ``unused``; nothing here."""

    def close(self) -> None:
        """Release what can be; rows that somebody holds stay."""

    def __reduce__(self) -> Any:
        """Reject pickling, which would copy them."""
        hint = "Make them by the system whose actors use them."
        raise LifecycleError("rings of threads can't be sent to a process", hint=hint)


class SharedRings(Rings):
    """The same for the processes of a Linux machine: one segment of shared memory.

    Args:
        forms: Name → form.
        segment: The name of one that another process made; None makes one.

    Raises:
        InputError: There is no room for it in shared memory.
        LifecycleError: The system refuses a file or a lock, or the segment is gone.
    """

    def __init__(self, forms: Mapping[str, RingForm], segment: str | None = None) -> None:
        self._name = segment
        super().__init__(forms)

    def _make(self, total: int) -> torch.Tensor:
        label = "rings"
        if self._name is None:
            form = Form(MutableMode.IN_PLACE, torch.int64, (total,), 1)
            zeros = torch.zeros((), dtype=torch.int64, device="cpu").expand(total)
            self._segment = Segment.create(label, form, zeros)
        else:
            self._segment = Segment.attach(label, self._name)
        return self._segment.slots[0]

    @property
    def segment(self) -> str:
        """The name of the shared memory."""
        return self._segment.name

    def close(self) -> None:
        """Remove the name, if this process made it."""
        if self._segment.is_maker:
            self._segment.close()

    def __reduce__(self) -> tuple[Callable[..., SharedRings], tuple[object, ...]]:
        """Pickle by name."""
        return _attached, (self.forms, self.segment)


_ATTACHED: weakref.WeakValueDictionary[tuple[str, int], SharedRings] = weakref.WeakValueDictionary()
"""By name and process, since a forked child has its own: one mapping for all handles while one of them lives."""


def _attached(forms: Mapping[str, RingForm], segment: str) -> SharedRings:
    key = segment, os.getpid()
    return _ATTACHED.get(key) or _ATTACHED.setdefault(key, SharedRings(forms, segment))


def _stamps_over(memory: torch.Tensor, count: int) -> Any:
    """Return the stamps at the start of memory: Python's for threads where the extension module is missing."""
    with contextlib.suppress(ImportError):
        from q4_actors._native import Stamps  # noqa: PLC0415  # optional

        return Stamps(memory.data_ptr(), count)
    return _ThreadStamps(count)


class _ThreadStamps:
    """Stamps of threads, without the extension module."""

    def __init__(self, count: int) -> None:
        self._values = [0] * count
        self._moved = threading.Condition()

    def value(self, which: int) -> int:
        return self._values[which]

    def publish(self, which: int, value: int) -> None:
        with self._moved:
            self._values[which] = value
            self._moved.notify_all()

    def wait(self, needs: list[tuple[int, int]], stop: int, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        with self._moved:
            while any(self._values[which] < least for which, least in needs):
                if stop >= 0 and self._values[stop]:
                    return _STOPPED
                if not self._moved.wait(max(0.0, deadline - time.monotonic())):
                    return _LATE
        return _REACHED
