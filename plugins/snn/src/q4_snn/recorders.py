"""``Recorder``: what some neurons do at some steps of a long run, in memory or in a file that grows step by step."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from q4core import CheckpointError, ConfigError, InputError
from q4core.plugin_api import Staging, sync

if TYPE_CHECKING:
    import os
    from collections.abc import Container, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Recorder", "events_of"]

_HEADER = 256
"""Bytes before the numbers; a header that grows with them is filled up to this."""
_FORMS = (".npy", ".safetensors")
_PIECE = 16
"""Numbers of float32 that eight bytes of comparisons stand for."""


def events_of(spikes: torch.Tensor) -> torch.Tensor:
    """Return where spikes are, as rows (step, sample, neuron), int64 [count, 3], in that order.

    As ``spikes.nonzero()``, which looks at every number twice: here at those alone that lie near a spike.

    Args:
        spikes: [T, B, n], of any dtype.
    """
    if (
        not spikes.numel()
        or spikes.dtype is not torch.float32
        or not spikes.is_contiguous()
        or spikes.storage_offset() % 2
    ):
        return spikes.nonzero()
    flat = spikes.view(-1)
    whole = len(flat) - len(flat) % _PIECE
    is_marked = flat[:whole].view(torch.int64) != 0  # two numbers at once, and then eight of these
    pieces = is_marked.view(torch.int64).nonzero()[:, 0]
    piece, place = flat[:whole].view(-1, _PIECE)[pieces].nonzero(as_tuple=True)
    places = torch.cat((pieces[piece] * _PIECE + place, flat[whole:].nonzero()[:, 0] + whole))
    step, place = places // spikes[0].numel(), places % spikes[0].numel()
    return torch.stack((step, place // spikes.shape[2], place % spikes.shape[2]), 1)


class Recorder:
    """What a population gives, or a state of it, of some neurons at some steps of ``Network.run``.

    Rows are written as they come. With a file it is a context manager: the file gets its name at the end of the block,
    complete, and none is there if the block fails. One recorder may follow several runs, one after the other.

    Args:
        what: Name of a population for what it gives; ``population.mem`` for a state.
        neurons: Indices of those to record; None for all.
        every: Record each ``every``-th step, from ``start`` on.
        start: The first step, by the clock of the network's state, 0 or more.
        stop: The step before which recording ends; None for no end.
        events: Record spikes as rows (step, sample, neuron), int64, which is short where few fire. Otherwise a row is
            [B, n], of the network's dtype.
        file: Path that ends in ``.npy`` or ``.safetensors``; None to record in memory.

    Raises:
        ConfigError: An argument is not legal.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        what: str,
        *,
        neurons: Sequence[int] | torch.Tensor | None = None,
        every: int = 1,
        start: int = 0,
        stop: int | None = None,
        events: bool = False,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.what, self.every, self.start, self.stop, self.events = what, every, start, stop, events
        for name, value, least in (("every", every, 1), ("start", start, 0), ("stop", stop, start)):
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not (is_whole and value is not None and value >= least) and not (name == "stop" and value is None):
                raise ConfigError(self._what, name=name, rule=f"a whole number, {least} or more", value=value)
        self.neurons = None
        if neurons is not None:
            self.neurons = torch.as_tensor(neurons)
            if self.neurons.dtype is not torch.int64 or self.neurons.dim() != 1 or not len(self.neurons):
                rule = "whole numbers, one or more"
                raise ConfigError(self._what, name="neurons", rule=rule, value=[*self.neurons.shape])
        self.file = None if file is None else Path(file)
        if self.file is not None and self.file.suffix not in _FORMS:
            raise ConfigError(
                self._what, name="file", rule=f"a path that ends in {' or '.join(_FORMS)}", value=str(file)
            )
        self.rows = 0
        """The number of rows so far."""
        self._parts: list[torch.Tensor] = []
        self._row: tuple[torch.dtype, tuple[int, ...]] | None = None
        self._staging: Staging | None = None
        self._out: IO[bytes] | None = None

    @property
    def _what(self) -> str:
        return f"recorder of {self.what!r}"

    # -- what a run calls

    def check(self, size: int) -> None:
        """Refuse neurons that a population of ``size`` has not, and a file outside a ``with`` block.

        Raises:
            InputError: One of these.
        """
        if self.neurons is not None and (int(self.neurons.min()) < 0 or int(self.neurons.max()) >= size):
            value = [int(self.neurons.min()), int(self.neurons.max())]
            raise InputError(self._what, name="neurons", rule=f"in 0 … {size - 1}", value=value)
        if self.file is not None and self._out is None:
            hint = f"with Recorder({self.what!r}, file=…) as recorder:"
            raise InputError(
                self._what, name="file", rule="open: the run is in a with block", value="closed", hint=hint
            )

    def wants(self, first: int, steps: int) -> bool:
        """Return whether any of some steps is to be recorded."""
        return bool(self._steps(first, steps))

    def _steps(self, first: int, steps: int) -> range:
        begin = self.start + max(0, -(-(first - self.start) // self.every)) * self.every
        end = first + steps if self.stop is None else min(self.stop, first + steps)
        return range(begin, max(begin, end), self.every)

    def add(self, first: int, values: torch.Tensor) -> None:
        """Record what is wanted of steps from ``first`` on, [T, B, n].

        Raises:
            InputError: Events are wanted of other numbers than 0 and 1, or B, n or the dtype is not what it was.
            CheckpointError: The file can't be written.
        """
        steps = self._steps(first, len(values))
        if not steps:
            return
        rows = values.detach()[steps.start - first : steps.stop - first : self.every].cpu()
        if self.neurons is not None:
            rows = rows[..., self.neurons]
        if self.events:
            found = events_of(rows)
            given = rows[found.unbind(1)]
            if bool((wrong := given != 1).any()):
                rule = "of spikes, 0 and 1 alone, for events"
                raise InputError(self._what, name="value", rule=rule, value=given[wrong][0].item())
            rows = found
            if self.neurons is not None:
                rows[:, 2] = self.neurons[rows[:, 2]]
            rows[:, 0] = rows[:, 0] * self.every + steps.start
        self._add(rows)

    def takes_events(self, firing: Container[str]) -> bool:
        """Return whether it wants events of all neurons of one of some populations, for ``add_events``."""
        return self.events and self.neurons is None and self.what in firing

    def add_events(self, first: int, count: int, events: torch.Tensor) -> None:
        """Record what is wanted of the events of ``count`` steps from ``first`` on, int64 [events, 3].

        Raises:
            InputError: It has recorded other rows than events.
            CheckpointError: The file can't be written.
        """
        steps = self._steps(first, count)
        if not steps:
            return
        place = events[:, 0] + (first - steps.start)
        is_wanted = (place >= 0) & (place < steps.stop - steps.start)
        if self.every > 1:
            is_wanted &= place % self.every == 0
        rows = events[is_wanted].cpu()
        rows[:, 0] += first
        self._add(rows)

    def _add(self, rows: torch.Tensor) -> None:
        row = rows.dtype, tuple(rows.shape[1:])
        if self._row not in {None, row}:
            rule = f"rows of {self._row}, as before"
            raise InputError(self._what, name="value", rule=rule, value=row)
        self._row = row
        self.rows += len(rows)
        if self._out is None:
            self._parts.append(rows.clone())
        else:
            rows = rows.float() if rows.dtype is torch.bfloat16 else rows  # numpy has none
            try:
                self._out.write(rows.contiguous().numpy().data)
            except OSError as error:
                raise self._unwritten(error) from error

    # -- what was recorded

    @property
    def data(self) -> torch.Tensor:
        """What was recorded in memory: [rows, B, n], or int64 [rows, 3] of events.

        Raises:
            InputError: It went to a file, or nothing was recorded yet.
        """
        if self.file is not None or (self._row is None and not self.events):
            value = "nothing" if self.file is None else str(self.file)
            raise InputError(self._what, name="data", rule="recorded in memory", value=value)
        if not self._parts:
            return torch.zeros(0, 3, dtype=torch.int64)
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]

    def __enter__(self) -> Self:
        """Begin the file, under a temporary name.

        Raises:
            CheckpointError: There is no such folder, or it can't be written.
        """
        if self.file is not None:
            try:
                self._staging = Staging(self.file.resolve().parent)
                self._out = (self._staging.path / self.file.name).open("wb")
                self._out.write(b" " * _HEADER)
            except OSError as error:
                self._discard()
                raise self._unwritten(error) from error
            self.rows, self._row = 0, None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the file its name; or remove what there is of it, if the block failed.

        Raises:
            CheckpointError: It can't be written, or nothing was recorded.
        """
        if self.file is None or self._out is None or self._staging is None:
            return
        try:
            if kind is None:
                if self._row is None and not self.events:
                    hint = "Run a network with recorders=[recorder] in the block, over steps that it records."
                    raise CheckpointError(self._what, name="rows", rule="1 or more", value=0, hint=hint)
                self._out.seek(0)
                self._out.write(self._header())
                self._out.close()
                path = self._staging.path / self.file.name
                sync(path)
                path.replace(self.file)
                sync(self.file.resolve().parent)
        except OSError as failure:
            raise self._unwritten(failure) from failure
        finally:
            self._discard()

    def _header(self) -> bytes:
        dtype, shape = self._row or (torch.int64, (3,))
        numbers = torch.empty(0, dtype=torch.float32 if dtype is torch.bfloat16 else dtype).numpy().dtype
        full = [self.rows, *shape]
        if self.file is not None and self.file.suffix == ".npy":
            facts = {"descr": numbers.str, "fortran_order": False, "shape": (*full,)}
            text = repr(facts).encode().ljust(_HEADER - 11) + b"\n"
            return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        stored = f"{'I' if dtype is torch.int64 else 'F'}{8 * numbers.itemsize}"
        entry = {"dtype": stored, "shape": full, "data_offsets": [0, math.prod(full) * numbers.itemsize]}
        text = json.dumps({self.what: entry}).encode().ljust(_HEADER - 8)
        return (_HEADER - 8).to_bytes(8, "little") + text

    def _discard(self) -> None:
        if self._out is not None:
            with contextlib.suppress(OSError):  # what is still to be written, to a full disk
                self._out.close()
        if self._staging is not None:
            self._staging.discard()
        self._out = self._staging = None

    def _unwritten(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            self._what, name="file", rule="one that can be written", value=str(error), where=str(self.file)
        )
