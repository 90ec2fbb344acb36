"""Checks of writers of files: what they write is read again, whole or not at all, in bounded memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from q4_conformance.checks.files import expect_tensors, file_check, tensors_of
from q4_conformance.checks.surroundings import code_of
from q4_conformance.contract.case import expect
from q4_conformance.measurement.allocations import own_mappings, status_bytes, trim
from q4_conformance.oracle.exact import exact_weight
from q4_conformance.outcome import FailureError
from q4_conformance.subjects.dialect import samples
from q4core import BUILTIN_FORMATS, Q4Error
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from q4_conformance.subjects.files import FileSubject

_BYTES = 1 << 24
_COUNT = 10
_MOST = 3 * _BYTES
_POLL = 0.002
_RAISED: tuple[type[BaseException], ...] = (*PLUGIN_FAULTS, KeyboardInterrupt)


class _Lazy(Mapping[str, Any]):
    """Tensors that are made as they are asked for."""

    def __init__(self, names: tuple[str, ...], make: Callable[[int], Any]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> Any:
        return self._make(self._names.index(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _fails_late(end: Callable[[], object]) -> _Lazy:
    """Return tensors of which the last but one is not given."""
    tensors = tensors_of(seed=8)
    names = tuple(tensors)

    def make(index: int) -> torch.Tensor:
        if index == len(names) - 2:
            end()
        return tensors[names[index]]

    return _Lazy(names, make)


@file_check("file_write_round")
def _check_round(subject: FileSubject, folder: Path) -> str:
    path, seen = subject.path(folder), []
    dense = tensors_of() | {"special": torch.tensor([-0.0, float("inf"), float("nan")]), "half": torch.ones(4).half()}
    for kind in BUILTIN_FORMATS:
        for name, weight in samples(kind):
            for dialect in subject.dialects:
                try:
                    subject.write(path, {"proj": weight, "q.proj": weight}, dialect=dialect, dense=dense)
                except Q4Error:  # a dialect that has no such weight, or would not find it again
                    continue
                what = f"{kind}, {name}, as {dialect}"
                source = subject.open(path)
                expect(set(source.schema.layers) == {"proj", "q.proj"}, f"{what}: layers {[*source.schema.layers]}")
                for module in source.schema.layers:
                    same = np.array_equal(exact_weight(source.read(module)), exact_weight(weight))
                    expect(same, f"{what}: {module} has other values")
                source.close()
                expect_tensors(subject.read(path), dense, what)
                seen.append(what)
                break
    if not seen:
        promised = ", ".join(sorted(getattr(getattr(subject.writer, "dialect", None), "formats", ())))
        expect(not promised, f"no weight is written, and the writer's own dialect has {promised}")
        subject.write(path, {}, dense=dense)
        expect_tensors(subject.read(path), dense, "dense tensors alone")
    expect([*folder.iterdir()] == [path], f"other files are left: {sorted(item.name for item in folder.iterdir())}")
    return "; ".join(seen) or "dense tensors alone"


def _refuse(error: BaseException) -> None:
    raise error


@file_check("file_write_atomic")
def _check_atomic(subject: FileSubject, folder: Path) -> str:
    errors: tuple[BaseException, ...] = (
        OSError(28, "No space left on device"),
        RuntimeError("planted"),
        KeyboardInterrupt(),
    )
    for old in (False, True):
        path = subject.path(folder)
        if old:
            subject.write(path, {}, dense=tensors_of())
        before = {item: item.read_bytes() for item in folder.rglob("*")}
        for error in errors:
            what = f"writing {'over a file' if old else 'a new file'} fails by {type(error).__name__}, and"
            try:
                subject.write(path, {}, dense=_fails_late(lambda error=error: _refuse(error)))  # type: ignore[misc]
            except _RAISED:
                after = {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()}
                left = sorted(item.name for item in {*folder.rglob("*")} - {*before})
                expect(not left, f"{what} it leaves {', '.join(left)}")
                expect(after == before, f"{what} the old file is gone or changed")
            else:
                raise FailureError(f"{what} nothing is raised")
    return f"{2 * len(errors)} failures"


@file_check("file_write_killed")
def _check_killed(subject: FileSubject, folder: Path) -> str:
    path = subject.path(folder)
    subject.write(path, {}, dense=tensors_of())
    before = path.read_bytes()
    dialect = subject.written_as  # asked for before the fork
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            end = _fails_late(lambda: os.kill(os.getpid(), signal.SIGKILL))
            subject.write(path, {}, dialect=dialect, dense=end)
        finally:
            os._exit(1)
    code = code_of(child)
    expect(code == -signal.SIGKILL, f"a writer that was to be killed half way ended with {code}")
    expect(path.exists() and path.read_bytes() == before, "a writer was killed, and the old file is gone or changed")
    subject.write(path, {}, dense=tensors_of(seed=9))
    expect_tensors(subject.read(path), tensors_of(seed=9), "written after one was killed")
    left = sorted(item.name for item in folder.iterdir() if item != path)
    expect(not left, f"a writer was killed, and the next one leaves its {', '.join(left)}")
    return "the old file stays, and the next writer clears up"


@file_check("file_write_stream")
def _check_stream(subject: FileSubject, folder: Path) -> str:
    peak, over = 0, threading.Event()

    def anonymous() -> int:
        return status_bytes().get("RssAnon", 0)

    def watch() -> None:
        nonlocal peak
        while not over.wait(_POLL):
            peak = max(peak, anonymous())

    names = tuple(f"large.{index}" for index in range(_COUNT))
    subject.write(subject.path(folder), {}, dense=tensors_of())  # what is loaded once is no part of it
    trim()
    before, watcher = anonymous(), threading.Thread(target=watch)
    watcher.start()
    try:
        dense = _Lazy(names, lambda index: torch.full((1024, _BYTES // 4096), float(index)))
        with own_mappings():
            subject.write(subject.path(folder), {}, dense=dense)
    except PLUGIN_FAULTS as error:
        raise FailureError(f"write raised {describe_exception(error)}") from error
    finally:
        over.set()
        watcher.join()
    rise = max(0, peak - before)
    expect(rise < _MOST, f"writing {_COUNT} tensors of {_BYTES:,} bytes, one by one, takes {rise:,} bytes of memory")
    return f"{_COUNT * _BYTES:,} bytes"
