"""Check of mutable tensors that processes share: they race, each records what it did, and one order must explain all.

The clock of the records is the system's, so that the operations of different processes can be compared.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.checks.mutable import actors, content_of, judge_history
from q4_conformance.contract.case import check
from q4_conformance.measurement.history import Operation, Recorder
from q4_conformance.outcome import FailureError, NotTestableError
from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext

    from q4_conformance.contract.case import Case

_WRITERS, _READERS, _UPDATES = 2, 2, 150
_TOTAL = _WRITERS * _UPDATES
_SHAPE = (4096,)
_SECONDS = 90.0
_LONGEST_FOLDER = 60
"""A socket's path has 107 bytes, and multiprocessing adds a folder and a file."""


def _write(state: Any, index: int, recorder: Recorder, has_readers: Callable[[], bool]) -> None:
    end = time.monotonic() + _SECONDS
    for turn in range(_UPDATES):
        while turn == _UPDATES // 2 and not has_readers() and time.monotonic() < end:
            time.sleep(0)  # on a busy machine all updates may be done before a reader has begun
        mark = 1 + index + _WRITERS * turn
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
            if index < _WRITERS:
                _write(state, index, recorder, lambda due=turn * _READERS: begun.value >= due)  # type: ignore[misc]
                with ended.get_lock():
                    ended.value += 1
            else:
                _read(state, recorder, begun, lambda due=turn * _WRITERS: ended.value < due)  # type: ignore[misc]
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
    start, counts = context.Barrier(_WRITERS + _READERS), (context.Value("i", 0), context.Value("i", 0))
    pipes = [context.Pipe(duplex=False) for _ in range(_WRITERS + _READERS)]
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
    return f"{len(modes) * _TOTAL} updates by {_WRITERS} processes, {reads} reads by {_READERS}"
