"""Checks of mutable tensors: threads or processes race, each operation is recorded, one order must explain them all.

The clock of the records is the system's, so that the operations of different processes can be compared.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.contract.case import check, expect
from q4_conformance.measurement.history import Operation, Recorder, violations
from q4_conformance.outcome import FailureError, NotTestableError, said
from q4core import ConfigError, WriteConflictError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext

    from q4_conformance.contract.case import Case


_WRITERS, _READERS, _UPDATES = 3, 4, 200
_SHAPE = (4096,)
_SHOWN = 3
_SECONDS = 90.0


def actors() -> Any:
    """Return the package of mutable tensors, which is judged as a plugin is: by its name."""
    return importlib.import_module("q4_actors")


def content_of(tensor: torch.Tensor) -> Hashable:
    """Return all that a tensor holds: one number, or every different one where an update was seen half done."""
    values = torch.unique(tensor)
    return int(values[0]) if values.numel() == 1 else tuple(values.tolist())


def _run(workers: Iterable[Callable[[], None]], readers: Iterable[Callable[[], None]], done: threading.Event) -> None:
    """Run writers and readers together until the writers have ended; fail where one raised."""
    with concurrent.futures.ThreadPoolExecutor(_WRITERS + _READERS) as pool:
        writing, reading = ([pool.submit(act) for act in acts] for acts in (workers, readers))
        concurrent.futures.wait(writing)
        done.set()
    problems = [said(error) for item in (*writing, *reading) if (error := item.exception()) is not None]
    expect(not problems, "; ".join(problems[:_SHOWN]))


def judge_race(make: Callable[[torch.Tensor, Any], Any], mode: Any) -> int:
    """Let writers and readers race on a tensor that ``make`` gives, judge what they saw, return the number of reads.

    Each writer writes a number that nobody else does, so that a read tells whose update it saw, and whether all of it.
    """
    state = make(torch.zeros(_SHAPE, dtype=torch.int64), mode)
    recorder = Recorder()
    start, done, begun = threading.Barrier(_WRITERS + _READERS), threading.Event(), threading.Event()

    def writer(index: int) -> Callable[[], None]:
        def write() -> None:
            start.wait()
            for turn in range(_UPDATES):
                if turn == _UPDATES // 2:  # on a busy machine all may be done before a reader has begun
                    begun.wait(_SECONDS)
                mark = 1 + index + _WRITERS * turn
                with recorder.record("write") as seen:
                    with state.write(wait=True) as tensor:
                        tensor.fill_(mark)
                        seen["version"] = state.version + 1
                    seen["value"] = mark

        return write

    def read() -> None:
        start.wait()
        is_last = False
        while not is_last:
            is_last = done.is_set()
            try:
                with recorder.record("read") as seen, state.read() as view:
                    seen["version"], seen["value"] = view.version, content_of(view.tensor)
            finally:
                begun.set()
            time.sleep(0)

    _run([writer(index) for index in range(_WRITERS)], [read] * _READERS, done)
    return judge_history(recorder.operations, state, mode, _WRITERS * _UPDATES)


def judge_history(history: Sequence[Operation], state: Any, mode: Any, total: int) -> int:
    """Judge what was seen of so many updates of a tensor, and return how many reads there were."""
    faults = violations(history, 0)
    expect(not faults, f"{mode.value}: no order explains {'; '.join(faults[:_SHOWN])}")
    expect(state.version == total, f"{mode.value}: version {state.version} after {total} updates")
    reads = [item for item in history if item.kind == "read"]
    expect(len({item.version for item in reads}) > 1, f"{mode.value}: the readers saw nothing change")
    return len(reads)


@check("mutable_race")
def check_mutable_race(_case: Case, _subject: object) -> str:
    """Threads race on one tensor, in both modes: no torn read, versions only grow, one order explains everything."""
    reads = 0
    judged = actors()
    for mode in judged.MutableMode:
        reads += judge_race(lambda tensor, wanted: judged.MutableTensor(tensor, mode=wanted), mode)
        _check_one_writer(judged.MutableTensor, mode)
    return f"{2 * _WRITERS * _UPDATES} updates, {reads} reads"


def _check_one_writer(make: Callable[..., Any], mode: Any) -> None:
    state = make(torch.zeros(4), mode=mode)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with state.write() as tensor:
            inside.set()
            leave.wait()
            tensor.add_(1)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    try:
        with state.write():
            pass
    except WriteConflictError:
        pass
    else:
        raise FailureError(f"{mode.value}: two writers at once")
    finally:
        leave.set()
        thread.join()
    expect(state.version == 1, f"{mode.value}: version {state.version} after one update")


_WRITING, _READING, _TURNS = 2, 2, 150
"""Processes, and updates of each that writes."""
_TOTAL = _WRITING * _TURNS
_LONGEST_FOLDER = 60
"""A socket's path has 107 bytes, and multiprocessing adds a folder and a file."""


def _write(state: Any, index: int, recorder: Recorder, has_readers: Callable[[], bool]) -> None:
    end = time.monotonic() + _SECONDS
    for turn in range(_TURNS):
        while turn == _TURNS // 2 and not has_readers() and time.monotonic() < end:
            time.sleep(0)  # on a busy machine all updates may be done before a reader has begun
        mark = 1 + index + _WRITING * turn
        with recorder.record("write") as seen:
            with state.write(wait=True) as tensor:
                tensor.fill_(mark)
                seen["version"] = state.version + 1
            seen["value"] = mark


def _read(state: Any, recorder: Recorder, begun: Any, has_writers: Callable[[], bool]) -> None:
    """Read until no writer is left, and once more."""
    end = time.monotonic() + _SECONDS
    is_last = False
    while not is_last and time.monotonic() < end:
        is_last = not has_writers()
        with recorder.record("read") as seen, state.read() as view:
            seen["version"], seen["value"] = view.version, content_of(view.tensor)
        if begun is not None:
            with begun.get_lock():
                begun.value += 1
            begun = None
        time.sleep(0)


def _act(index: int, states: tuple[Any, ...], start: Any, counts: tuple[Any, Any], answers: Connection) -> None:
    """Be one process: write or read each tensor in its turn, and tell what was seen."""
    torch.set_num_threads(1)
    begun, ended = counts
    try:
        for turn, state in enumerate(states, 1):
            recorder = Recorder()
            start.wait(_SECONDS)
            if index < _WRITING:
                _write(state, index, recorder, lambda due=turn * _READING: begun.value >= due)  # type: ignore[misc]
                with ended.get_lock():
                    ended.value += 1
            else:
                _read(state, recorder, begun, lambda due=turn * _WRITING: ended.value < due)  # type: ignore[misc]
            answers.send(recorder.operations)
    except BaseException as error:  # noqa: BLE001  # a process's failure is the case's
        start.abort()
        answers.send(f"{type(error).__name__}: {error}")


def _context() -> ForkServerContext | SpawnContext:
    """Return what starts processes that share nothing with this one but what they are given.

    Where the system can, one new process loads torch, and all others begin as copies of it.
    """
    has_room = len(tempfile.gettempdir()) < _LONGEST_FOLDER  # for the name of a socket there
    if "forkserver" not in multiprocessing.get_all_start_methods() or not has_room:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def judge_processes(make: Callable[[torch.Tensor, Any], Any], modes: tuple[Any, ...]) -> int:
    """Let processes race on a tensor in each mode, judge what they saw, and return the number of reads."""
    states = tuple(make(torch.zeros(_SHAPE, dtype=torch.int64), mode) for mode in modes)
    context = _context()
    start, counts = context.Barrier(_WRITING + _READING), (context.Value("i", 0), context.Value("i", 0))
    pipes = [context.Pipe(duplex=False) for _ in range(_WRITING + _READING)]
    actors = [
        context.Process(target=_act, args=(index, states, start, counts, writing), daemon=True)
        for index, (_, writing) in enumerate(pipes)
    ]
    try:
        for actor, (_, writing) in zip(actors, pipes, strict=True):
            actor.start()
            writing.close()
        reads = sum(_judge_mode(mode, state, pipes) for mode, state in zip(modes, states, strict=True))
    finally:
        for actor in actors:
            if actor.pid is not None:
                actor.kill()
                actor.join()
    return reads


def _judge_mode(mode: Any, state: Any, pipes: list[Any]) -> int:
    history: list[Operation] = []
    for index, (answers, _) in enumerate(pipes):
        try:
            told = answers.recv() if answers.poll(2 * _SECONDS) else "no answer in time"
        except EOFError:
            told = "it died"
        if isinstance(told, str):
            raise FailureError(f"{mode.value}: process {index}: {told}")
        history += told
    return judge_history(history, state, mode, _TOTAL)


@check("mutable_processes")
def check_mutable_processes(_case: Case, _subject: object) -> str:
    """Processes race on one tensor, in both modes: no torn read, versions only grow, one order explains everything."""
    judged = actors()

    def make(tensor: torch.Tensor, mode: Any) -> Any:
        try:
            return judged.SharedMutableTensor(tensor, mode=mode)
        except ConfigError as error:  # not on Linux, or without the extension module
            raise NotTestableError(str(error)) from error

    modes = tuple(judged.MutableMode)
    reads = judge_processes(make, modes)
    return f"{len(modes) * _TOTAL} updates by {_WRITING} processes, {reads} reads by {_READING}"
