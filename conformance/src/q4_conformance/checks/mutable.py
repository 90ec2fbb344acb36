"""Check of mutable tensors: threads race, and one order of events explains all that they saw."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import attrs
import torch

from q4_conformance.outcome import FailureError
from q4_conformance.table import check, expect
from q4core import MutableMode, MutableTensor, WriteConflictError

if TYPE_CHECKING:
    from q4_conformance.table import Case


@attrs.frozen
class _Operation:
    """A read or a write: the version that it saw or made, and when it began and ended."""

    version: int
    began: int
    ended: int


_WRITERS, _READERS, _UPDATES = 3, 4, 200


def _race(  # noqa: C901  # two kinds of thread and their start and end
    mode: MutableMode,
) -> tuple[list[_Operation], list[list[_Operation]], list[str], int]:
    """Let writers add one to every element while readers look; every element is always the version."""
    state = MutableTensor(torch.zeros(4096, dtype=torch.int64), mode=mode)
    writes: list[_Operation] = []
    reads: list[list[_Operation]] = [[] for _ in range(_READERS)]
    problems: list[str] = []
    start, done = threading.Barrier(_WRITERS + _READERS), threading.Event()

    def write() -> None:
        start.wait()
        for _ in range(_UPDATES):
            began = time.perf_counter_ns()
            with state.write(wait=True) as tensor:
                made = int(tensor[0]) + 1
                tensor.add_(1)
            writes.append(_Operation(made, began, time.perf_counter_ns()))

    def read(own: list[_Operation]) -> None:
        start.wait()
        while not done.is_set():
            began = time.perf_counter_ns()
            with state.read() as view:
                low, high, version = int(view.tensor.min()), int(view.tensor.max()), view.version
            own.append(_Operation(version, began, time.perf_counter_ns()))
            if not low == high == version:
                problems.append(f"version {version} holds {low} … {high}")
            time.sleep(0)

    def guarded(function: object, *arguments: object) -> None:
        try:
            function(*arguments)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001  # a thread's failure is the case's
            problems.append(f"{type(error).__name__}: {error}")
            start.abort()

    writers = [threading.Thread(target=guarded, args=(write,)) for _ in range(_WRITERS)]
    readers = [threading.Thread(target=guarded, args=(read, own)) for own in reads]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    return writes, reads, problems, state.version


def _order_faults(writes: list[_Operation], reads: list[_Operation]) -> list[str]:
    """Return where an operation that ended before another began saw or made a later version."""
    faults = []
    operations = [(item, True) for item in writes] + [(item, False) for item in reads]
    operations.sort(key=lambda pair: pair[0].began)
    ends = sorted(operations, key=lambda pair: pair[0].ended)
    newest, index = -1, 0
    for item, is_write in operations:
        while index < len(ends) and ends[index][0].ended < item.began:
            newest = max(newest, ends[index][0].version)
            index += 1
        least = newest + 1 if is_write else newest
        if item.version < least:
            faults.append(f"version {item.version} after version {newest} had ended")
    return faults


@check("mutable_race")
def check_mutable_race(case: Case, subject: object) -> str:
    """Threads race on one tensor, in both modes: no torn read, versions only grow, one order explains everything."""
    del case, subject
    seen = 0
    for mode in MutableMode:
        writes, reads, problems, version = _race(mode)
        where = mode.value
        expect(not problems, f"{where}: {problems[:3]}")
        total = _WRITERS * _UPDATES
        expect(version == total, f"{where}: version {version} after {total} updates")
        made = sorted(item.version for item in writes)
        expect(made == list(range(1, total + 1)), f"{where}: an update was lost or made twice")
        for own in reads:
            order = [item.version for item in own]
            expect(order == sorted(order), f"{where}: a reader saw versions go back")
        looked = [item for own in reads for item in own]
        faults = _order_faults(writes, looked)
        expect(not faults, f"{where}: no order explains {faults[:3]}")
        expect(len({item.version for item in looked}) > 1, f"{where}: the readers saw nothing change")
        seen += len(looked)
        _check_one_writer(mode)
    return f"{2 * _WRITERS * _UPDATES} updates, {seen} reads"


def _check_one_writer(mode: MutableMode) -> None:
    state = MutableTensor(torch.zeros(4), mode=mode)
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
