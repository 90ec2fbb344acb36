"""One sample: a writer and readers at work for a while, as threads or processes, and the rates of each."""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from benchmarks.memory.ways import CONTEXT, PROCESSES

if TYPE_CHECKING:
    from benchmarks.memory.ways import Way

__all__ = ["Scene", "sample", "summary"]

START_S, END_S = 60.0, 60.0


@attrs.frozen
class Scene:
    """How large the state is, how many read it, and how long each of them rests between two reads."""

    name: str
    elements: int
    readers: int
    pause_s: float = 0.0


@attrs.frozen
class _Signals:
    """Start and stop of actors, and the queue of their results; of threads or of processes.

    ``stop.value`` is a byte that all see: with an event, processes would wait for one another at each test.
    """

    start: Any
    stop: Any
    results: Any


def _work(way: Way, reader: int | None, pause_s: float, signals: _Signals) -> None:
    """Update (where there is no reader's number) or read until the stop signal, and put the rates into the queue."""
    try:
        signals.results.put((reader, _rates(way, reader, pause_s, signals)))
    except Exception as error:  # noqa: BLE001  # raised by the process that measures
        signals.results.put((reader, error))
        signals.start.abort()


def _rates(way: Way, reader: int | None, pause_s: float, signals: _Signals) -> dict[str, float]:
    torch.set_num_threads(1)
    if reader is None:
        for _ in range(way.warm_updates):
            way.update()
    copied = way.bytes_copied()
    signals.start.wait(START_S)
    count, longest, times = 0, 0.0, []
    began = ended = time.perf_counter()
    while not signals.stop.value:
        started = time.perf_counter()
        try:
            way.update() if reader is None else way.read(reader)
        except (queue.Empty, queue.Full, OSError, EOFError):  # the others have stopped
            if not signals.stop.value:
                raise
            break
        ended = time.perf_counter()
        longest = max(longest, ended - started)
        if count % 16 == 0 or pause_s:
            times.append(ended - started)
        count += 1
        if reader is not None and pause_s:
            time.sleep(pause_s)
    return {
        "count": count,
        "per_s": count / (ended - began) if count else 0.0,
        "median_us": statistics.median(times) * 1e6 if times else 0.0,
        "longest_us": longest * 1e6,
        "bytes_copied": way.bytes_copied() - copied,
    }


def sample(make: type[Way], scene: Scene, seconds: float) -> dict[str, float]:
    """Run one writer and some readers, and return updates and reads per second.

    Raises:
        WrongAnswerError: A read was torn, or went back. (Any other error of an actor is raised, too.)
        RuntimeError: An actor is gone.
    """
    way, readers = make(scene.elements, scene.readers), scene.readers
    is_apart = way.kind == PROCESSES
    kit: Any = CONTEXT if is_apart else threading
    stop = CONTEXT.RawValue("b", 0)
    results: Any = CONTEXT.Queue() if is_apart else queue.Queue()
    signals = _Signals(kit.Barrier(readers + 2), stop, results)
    worker_type: Any = CONTEXT.Process if is_apart else threading.Thread
    workers = [
        worker_type(target=_work, args=(way, who, scene.pause_s, signals), daemon=True)
        for who in (None, *range(readers))
    ]
    for worker in workers:
        worker.start()
    try:
        with contextlib.suppress(threading.BrokenBarrierError):  # the actor that broke it reports why
            signals.start.wait(START_S)
            time.sleep(seconds)
        stop.value = 1
        found = dict(results.get(timeout=END_S) for _ in workers)
        errors = [facts for facts in found.values() if isinstance(facts, Exception)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        for worker in workers:
            worker.join(END_S)
    except queue.Empty:
        raise RuntimeError(f"{make.__name__}: an actor is gone") from None
    finally:
        for worker in workers:
            if is_apart:
                worker.kill()
        way.close()
    writer = found.pop(None)
    return summary(writer, list(found.values()))


def summary(writer: dict[str, float], readers: list[dict[str, float]]) -> dict[str, float]:
    """Return what one sample says of all actors together."""
    return {
        "updates_per_s": writer["per_s"],
        "reads_per_s": sum(one["per_s"] for one in readers),
        "read_us": statistics.median(one["median_us"] for one in readers),
        "longest_read_us": max(one["longest_us"] for one in readers),
        "bytes_per_update": writer["bytes_copied"] / max(1, writer["count"]),
    }
