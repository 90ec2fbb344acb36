"""Check of mutable tensors: threads race, every operation is recorded, and one order of them must explain it all."""

from __future__ import annotations

import importlib
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.contract.case import check, expect
from q4_conformance.measurement.history import Operation, Recorder, violations
from q4_conformance.outcome import FailureError
from q4core import WriteConflictError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from q4_conformance.contract.case import Case

_WRITERS, _READERS, _UPDATES = 3, 4, 200
_SHAPE = (4096,)
_SHOWN = 3
_SECONDS = 60.0


def actors() -> Any:
    """Return the package of mutable tensors, which is judged as a plugin is: by its name."""
    return importlib.import_module("q4_actors")


def content_of(tensor: torch.Tensor) -> Hashable:
    """Return all that a tensor holds: one number, or every different one where an update was seen half done."""
    values = torch.unique(tensor)
    return int(values[0]) if values.numel() == 1 else tuple(values.tolist())


def _run(workers: Iterable[Callable[[], None]], readers: Iterable[Callable[[], None]], done: threading.Event) -> None:
    """Run writers and readers together until the writers have ended; fail where one raised."""
    problems: list[str] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # a thread's failure is the case's
            problems.append(f"{type(error).__name__}: {error}")
            done.set()

    writing = [threading.Thread(target=guarded, args=(item,)) for item in workers]
    reading = [threading.Thread(target=guarded, args=(item,)) for item in readers]
    for thread in (*writing, *reading):
        thread.start()
    for thread in writing:
        thread.join()
    done.set()
    for thread in reading:
        thread.join()
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
