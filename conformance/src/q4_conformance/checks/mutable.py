"""Checks of mutable tensors: threads or processes race, each operation is recorded, one order must explain them all.

The clock of the records is the system's, so that the operations of different processes can be compared.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import multiprocessing.dummy
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.contract.case import check, expect, raised
from q4_conformance.measurement.history import Operation, Recorder, violations
from q4_conformance.outcome import FailureError, NotTestableError
from q4core import ConfigError, WriteConflictError
from q4core.plugin_api import describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from q4_conformance.contract.case import Case

_THREADS, _PROCESSES = (3, 4, 200), (2, 2, 150)
"""Writers, readers, and updates of each writer."""
_SHAPE = (4096,)
_SHOWN = 3
_SECONDS = 90.0
_LONGEST_FOLDER = 60
"""A socket's path has 107 bytes, and multiprocessing adds a folder and a file."""


def actors() -> Any:
    """Return the package of mutable tensors, which is judged as a plugin is: by its name."""
    return importlib.import_module("q4_actors")


def content_of(tensor: torch.Tensor) -> Hashable:
    """Return all that a tensor holds: one number, or every different one where an update was seen half done."""
    values = torch.unique(tensor)
    return int(values[0]) if values.numel() == 1 else tuple(values.tolist())


def _write(state: Any, marks: range, begun: Sequence[Any], recorder: Recorder) -> None:
    for turn, mark in enumerate(marks):
        if turn == len(marks) // 2:  # on a busy machine all updates may be done before a reader has begun
            for event in begun:
                event.wait(_SECONDS)
        with recorder.record("write") as seen:
            with state.write(wait=True) as tensor:
                tensor.fill_(mark)
                seen["version"] = state.version + 1
            seen["value"] = mark


def _read(state: Any, begun: Any, ended: Sequence[Any], recorder: Recorder) -> None:
    """Read until no writer is left, and once more."""
    end = time.monotonic() + _SECONDS
    is_last = False
    while not is_last and time.monotonic() < end:
        is_last = all(event.is_set() for event in ended)
        with recorder.record("read") as seen, state.read() as view:
            seen["version"], seen["value"] = view.version, content_of(view.tensor)
        begun.set()
        time.sleep(0)


def _act(index: int, updates: int, rounds: Sequence[Any], start: Any, answers: Any) -> None:
    """Be one actor: write or read each tensor in its turn, and tell what was seen."""
    try:
        for state, ended, begun in rounds:
            recorder = Recorder()
            start.wait(_SECONDS)
            try:
                if index < len(ended):
                    _write(state, range(1 + index, 1 + updates * len(ended), len(ended)), begun, recorder)
                else:
                    _read(state, begun[index - len(ended)], ended, recorder)
            finally:
                (*ended, *begun)[index].set()
            answers.send(recorder.operations)
    except BaseException as error:  # noqa: BLE001  # an actor's failure is the case's
        start.abort()
        answers.send(describe_exception(error))


def _processes() -> Any:
    """Return what starts processes that share nothing with this one but what they are given.

    Where the system can, one new process loads torch, and all others begin as copies of it.
    """
    has_room = len(tempfile.gettempdir()) < _LONGEST_FOLDER  # for the name of a socket there
    if "forkserver" not in multiprocessing.get_all_start_methods() or not has_room:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def judge_race(make: Callable[[torch.Tensor, Any], Any], modes: Sequence[Any], *, has_processes: bool = False) -> str:
    """Let threads, or processes, race on a tensor that ``make`` gives in each mode, and judge what they saw.

    Each writer writes a number that nobody else does, so that a read tells whose update it saw, and whether all of it.
    Returns how many updates and reads there were.
    """
    writers, readers, updates = _PROCESSES if has_processes else _THREADS
    states = [make(torch.zeros(_SHAPE, dtype=torch.int64), mode) for mode in modes]
    context: Any = _processes() if has_processes else multiprocessing.dummy
    events = [[[context.Event() for _ in range(count)] for count in (writers, readers)] for _ in modes]
    rounds = [(state, *of_mode) for state, of_mode in zip(states, events, strict=True)]
    start, pipes = context.Barrier(writers + readers), [context.Pipe(duplex=False) for _ in range(writers + readers)]
    actors = [
        context.Process(target=_act, args=(index, updates, rounds, start, writing))
        for index, (_, writing) in enumerate(pipes)
    ]
    try:
        for actor, (_, writing) in zip(actors, pipes, strict=True):
            actor.daemon = True
            actor.start()
            writing.close()
        history = [_history(mode, [answers for answers, _ in pipes]) for mode in modes]
    finally:
        for actor in actors:
            if has_processes and actor.is_alive():
                actor.kill()
            if actor.ident is not None:
                actor.join()
    total = writers * updates
    reads = sum(judge_history(*told, total) for told in zip(history, states, modes, strict=True))
    return f"{len(states) * total} updates, {reads} reads"


def _history(mode: Any, pipes: Iterable[Any]) -> list[Operation]:
    """Return what all actors saw of the tensor of one mode."""
    history: list[Operation] = []
    for index, answers in enumerate(pipes):
        try:
            told = answers.recv() if answers.poll(2 * _SECONDS) else "no answer in time"
        except EOFError:
            told = "it died"
        if isinstance(told, str):
            raise FailureError(f"{mode.value}: actor {index}: {told}")
        history += told
    return history


def judge_history(history: Sequence[Operation], state: Any, mode: Any, total: int) -> int:
    """Judge what was seen of so many updates of a tensor, and return how many reads there were."""
    faults = violations(history, 0)
    expect(not faults, f"{mode.value}: no order explains {'; '.join(faults[:_SHOWN])}")
    expect(state.version == total, f"{mode.value}: version {state.version} after {total} updates")
    reads = [item for item in history if item.kind == "read"]
    expect(len({item.version for item in reads}) > 1, f"{mode.value}: the readers saw nothing change")
    return len(reads)


@check("mutable_race")
def _check_mutable_race(_case: Case, _subject: object) -> str:
    judged = actors()
    told = judge_race(lambda tensor, mode: judged.MutableTensor(tensor, mode=mode), tuple(judged.MutableMode))
    for mode in judged.MutableMode:
        _check_one_writer(judged.MutableTensor(torch.zeros(4), mode=mode), mode)
    return told


def _check_one_writer(state: Any, mode: Any) -> None:
    def write() -> None:
        with state.write():
            pass

    with concurrent.futures.ThreadPoolExecutor(1) as pool, state.write() as tensor:
        raised(WriteConflictError, pool.submit(write).result, f"{mode.value}: two writers at once")
        tensor.add_(1)
    expect(state.version == 1, f"{mode.value}: version {state.version} after one update")


@check("mutable_processes")
def _check_mutable_processes(_case: Case, _subject: object) -> str:
    judged = actors()

    def make(tensor: torch.Tensor, mode: Any) -> Any:
        try:
            return judged.SharedMutableTensor(tensor, mode=mode)
        except ConfigError as error:  # not on Linux, or without the extension module
            raise NotTestableError(str(error)) from error

    return judge_race(make, tuple(judged.MutableMode), has_processes=True)
