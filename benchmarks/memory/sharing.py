"""Costs of ``SharedMutableTensor`` between processes, compared with ``multiprocessing.Lock`` and ``share_memory_``.

    python -m benchmarks.memory.sharing

Alone: one read and one update of 64 numbers, from Python, in one process: the least and the median of many rounds.
Together: one writer and four readers, each a process. A reader sums the tensor, in a ``read()`` block or under a lock;
an update is one addition, or one step of leaky integrate-and-fire neurons. Either may also compute for a while inside
its block; the writer may rest between updates. In "taking alone" a reader only takes the tensor, since a sum costs
more than that. Kinds take turns, so that other load of the machine affects all equally. The result is stored as
``sharing``; a run of other rounds or seconds is no result, and lies in ``build/benchmarks``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from benchmarks import record
from q4_actors import MutableMode, SharedMutableTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUMBERS, READERS = 64, 4
ROUNDS, SECONDS = 5, 1.0
KINDS = ("lock", "versioned", "in_place")


@attrs.frozen
class Race:
    """What writer and readers do.

    Args:
        name: For the record.
        update_s: How long an update computes.
        rest_s: How long the writer rests after each.
        read_s: How long a read computes.
        is_summed: Whether a read sums the tensor, or only takes it.
        steps: Whether an update is a step of as many neurons, instead of one addition.
    """

    name: str
    update_s: float
    rest_s: float
    read_s: float
    is_summed: bool = True
    steps: bool = False


RACES = [
    Race("short blocks", 0.0, 1e-3, 0.0),
    Race("short blocks without rest", 0.0, 0.0, 0.0),
    Race("neurons step", 0.0, 1e-3, 0.0, steps=True),
    Race("neurons step without rest", 0.0, 0.0, 0.0, steps=True),
    Race("long updates", 2e-3, 1e-3, 0.0),
    Race("long updates without rest", 2e-3, 0.0, 0.0),
    Race("long reads", 0.0, 1e-3, 1e-3),
    Race("taking alone", 0.0, 1e-3, 0.0, is_summed=False),
]


def shared(kind: str, slots: int | None = None) -> SharedMutableTensor:
    """Return a tensor of one of the kinds."""
    mode = MutableMode(kind)
    slots = slots if mode is MutableMode.VERSIONED else None
    return SharedMutableTensor(torch.zeros(NUMBERS), mode=mode, slots=slots)


def alone() -> dict[str, dict[str, float]]:
    """Return what one read and one update take, µs; the kinds take turns, block by block."""
    with contextlib.ExitStack() as stack:
        uses: dict[tuple[str, str], Callable[[], None]] = {}
        for kind in KINDS[1:]:
            state = stack.enter_context(shared(kind))

            def read(state: SharedMutableTensor = state) -> None:
                with state.read() as view:
                    _ = view.tensor

            def write(state: SharedMutableTensor = state) -> None:
                with state.write():
                    pass

            uses[kind, "read"], uses[kind, "write"] = read, write
        blocks: dict[tuple[str, str], list[float]] = {name: [] for name in uses}
        for _ in range(300):
            for name, use in uses.items():
                start = time.perf_counter()
                for _ in range(100):
                    use()
                blocks[name].append((time.perf_counter() - start) * 1e4)
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS[1:]}
    for (kind, what), taken in blocks.items():
        found[kind][f"{what}_least_us"] = round(min(taken), 2)
        found[kind][f"{what}_median_us"] = round(statistics.median(taken), 2)
    return found


def _compute(seconds: float) -> None:
    if seconds:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass


def _add(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def _step(membranes: torch.Tensor) -> None:
    """Leak, integrate, fire and reset."""
    membranes.mul_(0.9).add_(0.2)
    membranes.masked_fill_(membranes >= 1.0, 0.0)


def _uses(kind: str, race: Race) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield what a reader and a writer do repeatedly."""
    update = _step if race.steps else _add
    if kind == "lock":
        tensor, lock = torch.zeros(NUMBERS).share_memory_(), multiprocessing.get_context("fork").Lock()

        def read() -> None:
            with lock:
                tensor.sum()
                _compute(race.read_s)

        def take() -> None:
            with lock:
                _ = tensor

        def write() -> None:
            with lock:
                update(tensor)
                _compute(race.update_s)

        yield (read if race.is_summed else take), write
        return
    with shared(kind, slots=8) as state:

        def read_shared() -> None:
            with state.read() as view:
                view.tensor.sum()
                _compute(race.read_s)

        def take_shared() -> None:
            with state.read() as view:
                _ = view.tensor

        def write_shared() -> None:
            with state.write(wait=True) as tensor:
                update(tensor)
                _compute(race.update_s)

        yield (read_shared if race.is_summed else take_shared), write_shared


def together(kind: str, race: Race, seconds: float) -> dict[str, float]:
    """Return reads and updates per second of one writer and all readers."""
    board = memoryview(mmap.mmap(-1, 4096)).cast("q")
    for read, write in _uses(kind, race):
        children = []
        for index, use in enumerate((write, *(read,) * READERS)):
            child = os.fork()
            if not child:
                _work(board, index, use, 0.0 if index else race.rest_s)
            children.append(child)
        board[0] = 1
        time.sleep(seconds)
        board[0] = 2
        for child in children:
            os.waitpid(child, 0)
    return {"reads_per_s": round(sum(board[9 : 9 + READERS]) / seconds), "updates_per_s": round(board[8] / seconds)}


def _work(board: memoryview, index: int, use: Callable[[], None], rest_s: float) -> None:
    count = 0
    try:
        while not board[0]:
            time.sleep(0.001)
        while board[0] == 1:
            use()
            count += 1
            if rest_s:
                time.sleep(rest_s)
    finally:
        board[8 + index] = count
        os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and store the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each race")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"alone": alone(), "together": []}
    for race in RACES:
        rounds = [{kind: together(kind, race, options.seconds) for kind in KINDS} for _ in range(options.rounds)]
        ratios = {
            kind: [round(each[kind]["reads_per_s"] / max(each["lock"]["reads_per_s"], 1), 2) for each in rounds]
            for kind in KINDS[1:]
        }
        result["together"].append({**attrs.asdict(race), "reads_over_lock": ratios, "rounds": rounds})
    print(json.dumps(result, indent=1))
    is_whole = (options.rounds, options.seconds) == (ROUNDS, SECONDS)
    print(f"written: {record.write('sharing', result, folder=record.RESULTS if is_whole else record.BUILD)}")


if __name__ == "__main__":
    main()
