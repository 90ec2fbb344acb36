"""Races threads or processes on a mutable tensor, kills writers at random, and checks every operation.

    python plugins/actors/tests/shared_stress.py --operations 10000000 --kills 200 --json result.json

Each version's content is its own number, in every element, so that each read shows whether it is whole. Before an
operation each worker looks at the newest version that any worker has reported, and afterwards at least that must have
been seen. Memory and counts lie in anonymous shared memory, so that a killed worker's counts stay. The first fault ends
its race; what was counted until then is written down, and the program fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import pathlib
import random
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import q4core as q4
from q4_actors import MutableMode, MutableTensor, SharedMutableTensor
from q4_actors.tensors.form import WRITER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ELEMENTS = 32
WRITERS, READERS, THREADS = 2, 3, 2
STUCK_S = 30.0
TURN = 104  # the word that says whose turn it is
KINDS = ("processes", "threads")


class Board:
    """What workers report to each other and to the parent, one line for each worker."""

    OPERATIONS, WRITES, TOLD, FAULTS, STOP, TORN, STALE = range(7)

    def __init__(self, lines: int) -> None:
        self.lines = lines
        self._memory = mmap.mmap(-1, lines * 64)
        self._words = memoryview(self._memory).cast("q")

    def add(self, line: int, column: int) -> None:
        """Count; each line has one writer at a time."""
        self._words[line * 8 + column] += 1

    def tell(self, line: int, version: int) -> None:
        """Report a version that an operation, now ended, has seen or made."""
        self._words[line * 8 + self.TOLD] = max(version, self._words[line * 8 + self.TOLD])

    @property
    def told(self) -> int:
        """The newest version that any worker has reported."""
        return max(self._words[self.TOLD :: 8])

    def total(self, column: int) -> int:
        """The sum over all workers."""
        return sum(self._words[column::8])

    def stop(self) -> None:
        """Let all workers end."""
        for line in range(self.lines):
            self._words[line * 8 + self.STOP] = 1

    def is_stopped(self, line: int) -> bool:
        """Whether this worker should end."""
        return bool(self._words[line * 8 + self.STOP])


class _FailedError(Exception):
    """An update that fails on purpose."""


class _TornError(Exception):
    """A version shows values of another."""


class _StaleError(Exception):
    """An operation has seen less than what was there before it began."""


class Worker:
    """One thread's operations."""

    def __init__(self, state: MutableTensor, board: Board, line: int, *, is_writer: bool) -> None:
        self._state, self._board, self._line, self._is_writer = state, board, line, is_writer
        self._random = random.Random(os.getpid() * 1000 + line)
        self._may_fail = state.mode is MutableMode.VERSIONED

    def run(self) -> None:
        """Work until stopped."""
        board, line = self._board, self._line
        while not board.is_stopped(line):
            try:
                floor = board.told
                version = self._operate()
                if version is not None:
                    if version < floor:
                        raise _StaleError(f"stale: version {version} after {floor}")  # noqa: TRY301  # told below
                    board.tell(line, version)
                board.add(line, Board.OPERATIONS)
            except q4.PoisonedError:
                time.sleep(0.001)  # the parent resets
            except Exception as fault:  # noqa: BLE001  # whatever it is, it is a fault
                traceback.print_exc()
                column = {_TornError: Board.TORN, _StaleError: Board.STALE}.get(type(fault), Board.FAULTS)
                board.add(line, column)
                return

    def _operate(self) -> int | None:
        chance = self._random.random()
        if self._is_writer and chance < 0.7:  # the mixture of operations
            return self._write(fails=self._may_fail and chance < 0.1)
        if chance < 0.9:
            with self._state.read() as view:
                _check(view.tensor, view.version)
            return view.version
        if chance < 0.97:
            taken = self._state.snapshot()
            _check(taken.tensor, taken.version)
            return taken.version
        version = self._state.version
        self._state.wait(version + 1, timeout=0.001)
        return version

    def _write(self, *, fails: bool) -> int | None:
        try:
            with self._state.write(wait=True) as tensor:
                version = self._state.version + 1
                tensor[: ELEMENTS // 2] = version
                if fails:
                    raise _FailedError  # noqa: TRY301  # the block is what fails
                tensor[ELEMENTS // 2 :] = version
        except _FailedError:
            return None
        self._board.add(self._line, Board.WRITES)
        return version


def _check(tensor: torch.Tensor, version: int) -> None:
    values = tensor.tolist()
    if values != [version] * ELEMENTS:
        raise _TornError(f"torn: version {version} shows {sorted(set(values))}")


def _start(run: Callable[[], None]) -> int:
    """Run something in a forked process, and return its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        run()
        code = 0
    finally:
        os._exit(code)


def _run_process(state: MutableTensor, board: Board, index: int) -> None:
    """Run the workers of one process: a writer has one thread, a reader several."""
    is_writer = index < WRITERS
    lines = [index * THREADS + thread for thread in range(1 if is_writer else THREADS)]
    threads = [threading.Thread(target=Worker(state, board, line, is_writer=is_writer).run) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Run:
    """One race, from the parent's side.

    Args:
        mode: Of the tensor.
        operations: How many at least.
        kills: How many writers to kill meanwhile at least; spread evenly.
        slots: Of the tensor, ``VERSIONED``.
    """

    def __init__(self, mode: MutableMode, operations: int, kills: int, slots: int) -> None:
        self.mode, self.operations, self.kills, self.slots = mode, operations, kills, slots
        self.board = Board((WRITERS + READERS) * THREADS)
        self.killed = self.amid = self.readers_killed = self.resets = 0

    def in_processes(self) -> dict[str, Any]:
        """Race processes."""
        chance = random.Random(7)
        content = torch.zeros(ELEMENTS, dtype=torch.int64)
        slots = self.slots if self.mode is MutableMode.VERSIONED else None
        state = SharedMutableTensor(content, mode=self.mode, slots=slots)
        with state:
            children = [
                _start(lambda index=index: _run_process(state, self.board, index))  # type: ignore[misc]  # bound here
                for index in range(WRITERS + READERS)
            ]
            try:
                for done in self._until_done():
                    self._heal(state)
                    if self.killed < self.kills and done * self.kills >= self.killed * self.operations:
                        index = chance.randrange(WRITERS)
                        self._choose_instant(state, children[index], chance)
                        self._kill(children, index, state)
                        self.killed += 1
                        self._kill(children, WRITERS + chance.randrange(READERS), state)
                        self.readers_killed += 1
                self.board.stop()
                self._join(children, state)
            except BaseException:
                for child in children:
                    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended, and was waited for
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                raise
            return self._result("processes", state)

    def _kill(self, children: list[int], index: int, state: SharedMutableTensor) -> None:
        os.kill(children[index], signal.SIGKILL)
        _, status = os.waitpid(children[index], 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:  # it had ended before
            _refuse_end(status)
        children[index] = _start(lambda: _run_process(state, self.board, index))

    def _choose_instant(self, state: SharedMutableTensor, child: int, chance: random.Random) -> None:
        """Sleep for a random time, and in three cases of four go on until the child is at an update."""
        time.sleep(chance.random() * 0.01)
        words = state._protocol.segment.words
        if chance.random() < 0.75:  # as said
            for _ in range(20_000):
                if words[WRITER] == child and words[TURN]:
                    self.amid += 1
                    return

    def in_threads(self) -> dict[str, Any]:
        """Race threads of one process."""
        state = MutableTensor(torch.zeros(ELEMENTS, dtype=torch.int64), mode=self.mode)
        threads = [
            threading.Thread(target=Worker(state, self.board, line, is_writer=line < WRITERS).run, daemon=True)
            for line in range(WRITERS + READERS)
        ]
        for thread in threads:
            thread.start()
        for _ in self._until_done():
            pass
        self.board.stop()
        deadline = time.monotonic() + STUCK_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise SystemExit("stuck at the end")
        return self._result("threads", state)

    @property
    def faults(self) -> int:
        """How many workers have ended because of something that must not be."""
        return sum(map(self.board.total, (Board.TORN, Board.STALE, Board.FAULTS)))

    def _until_done(self) -> Iterator[int]:
        self._began = time.perf_counter()
        before, moved = -1, time.monotonic()
        while (done := self.board.total(Board.OPERATIONS)) < self.operations or self.killed < self.kills:
            if self.faults:
                return
            if done != before:
                before, moved = done, time.monotonic()
            elif time.monotonic() - moved > STUCK_S:
                raise SystemExit(f"stuck after {done} operations")
            yield done
            time.sleep(0.002)

    def _heal(self, state: MutableTensor) -> None:
        if state.is_poisoned:
            version = state.version + 1  # nobody else resets, so it stays
            state.reset(torch.full((ELEMENTS,), version, dtype=torch.int64))
            self.resets += 1

    def _join(self, children: list[int], state: MutableTensor) -> None:
        deadline = time.monotonic() + STUCK_S
        left = list(children)
        while left:
            self._heal(state)
            for child in tuple(left):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    left.remove(child)
                    if status:
                        _refuse_end(status)
            if time.monotonic() > deadline:
                raise SystemExit("stuck at the end")
            time.sleep(0.002)

    def _result(self, kind: str, state: MutableTensor) -> dict[str, Any]:
        seconds = time.perf_counter() - self._began
        counted = self.board.total(Board.WRITES) + self.resets
        # A writer that is killed after it has published has not counted that update.
        if not self.faults and not counted <= state.version <= counted + self.killed:
            raise SystemExit(f"{counted} updates and {self.killed} kills made version {state.version}")
        return {
            "kind": kind,
            "mode": self.mode.value,
            "operations": self.board.total(Board.OPERATIONS),
            "writes": self.board.total(Board.WRITES),
            "version": state.version,
            "killed": self.killed,
            "killed_at_an_update": self.amid,
            "readers_killed": self.readers_killed,
            "resets": self.resets,
            "seconds": round(seconds, 1),
            "torn": self.board.total(Board.TORN),
            "stale": self.board.total(Board.STALE),
            "faults": self.board.total(Board.FAULTS),
        }


def _refuse_end(status: int) -> NoReturn:
    raise SystemExit(f"a worker ended with exit code {os.waitstatus_to_exitcode(status)}")


def _environment(load: float) -> dict[str, Any]:
    """Return what every result carries, with the load of the machine before."""
    sys.path.append(str(pathlib.Path(__file__).parents[3]))  # a program has its own folder there alone
    from benchmarks.record import environment  # noqa: PLC0415  # as said

    return {**environment(), "load_average": load}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run all races, and return what they did; the program fails if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000, help="of each kind and mode, at least")
    parser.add_argument("--kills", type=int, default=20, help="of writers, in each mode, at least")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--modes", nargs="+", choices=[mode.value for mode in MutableMode], default=None)
    parser.add_argument("--slots", type=int, default=8, help="of VERSIONED")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the result")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    for kind in options.kinds:
        for mode in MutableMode if options.modes is None else map(MutableMode, options.modes):
            run = Run(mode, options.operations, 0 if kind == "threads" else options.kills, slots=options.slots)
            results.append(run.in_threads() if kind == "threads" else run.in_processes())
            print(results[-1], flush=True)  # noqa: T201  # a program's result
    if options.json is not None:
        record = {"environment": _environment(load), "races": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if any(race["torn"] or race["stale"] or race["faults"] for race in results):
        raise SystemExit("a worker found a fault")
    return results


if __name__ == "__main__":
    main()
