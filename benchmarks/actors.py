"""Actors: time of a round trip, and the memory that a shared weight costs each of ten processes.

Round trips take turns within one process with the bare means of Python: a thread behind two ``queue.Queue``, and a
process behind a ``multiprocessing.Pipe``. Ray's come after them, where it is installed. Bytes are from Linux's smaps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record, verdict
from q4_actors import Actor, ActorSystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from q4_actors import SharedWeight

ACTORS = 10
TARGETS_US = {"threads": 20.0, "processes": 60.0}
SHARE = 0.05
_ROWS, _COLUMNS, _COPIES = 4096, 4096, 56
_TIMEOUT_S = 120.0


class Echo(Actor):
    """Answers what it is asked."""

    def on_receive(self, message: Any) -> Any:
        """Answer."""
        return message


class Holder(Actor):
    """Makes a layer of a shared weight, and computes with all of it."""

    def on_receive(self, message: tuple[SharedWeight, int]) -> float:
        """Compute once, and keep the layer."""
        weight, columns = message
        self.layer = weight.layer()
        return float(self.layer(torch.ones(1, columns)).sum())


def _pipe_echo(end: Any) -> None:
    with contextlib.suppress(EOFError):
        while True:
            end.send(end.recv())


@contextlib.contextmanager
def _bare_thread() -> Iterator[Callable[[], object]]:
    there: queue.Queue[Any] = queue.Queue()
    back: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        while (message := there.get()) is not None:
            back.put(message)

    worker = threading.Thread(target=work)
    worker.start()

    def call() -> object:
        there.put(1)
        return back.get()

    yield call
    there.put(None)
    worker.join()


@contextlib.contextmanager
def _bare_process() -> Iterator[Callable[[], object]]:
    context = multiprocessing.get_context("forkserver")
    own, other = context.Pipe()
    worker = context.Process(target=_pipe_echo, args=(other,), daemon=True)
    worker.start()
    other.close()

    def call() -> object:
        own.send(1)
        return own.recv()

    yield call
    own.close()
    worker.join()


def round_trips(rounds: int) -> dict[str, Any]:
    """Return microseconds of an ``ask`` of a small message on each runtime, and of the bare means."""
    with contextlib.ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {
            "queue.Queue": stack.enter_context(_bare_thread()),
            "multiprocessing.Pipe": stack.enter_context(_bare_process()),
        }
        for runtime in TARGETS_US:
            calls[runtime] = _asking(stack.enter_context(ActorSystem(runtime)))
        samples = record.interleaved_us(calls, rounds=rounds, repeats=200)
    if importlib.util.find_spec("ray"):  # alone, for its own threads take the interpreter's lock from all others
        with ActorSystem("ray") as system:
            samples |= record.interleaved_us({"ray": _asking(system)}, rounds=rounds, repeats=20)
    return {name: record.summary(values) for name, values in samples.items()}


def _asking(system: ActorSystem) -> Callable[[], object]:
    ref = system.spawn(Echo)
    ref.ask(1, timeout=_TIMEOUT_S)
    return lambda: ref.ask(1)


def shared_weight(copies: int) -> dict[str, Any]:
    """Return what ten processes have for themselves of one weight, and together."""
    torch.manual_seed(0)
    block = q4.quantize(torch.randn(_ROWS, _COLUMNS), "nf4")
    with q4.Session(q4.SessionConfig(device="cpu")) as session, ActorSystem("processes") as system:
        weight = system.share(session.linear(q4.cat([block] * copies), name="large"), canonical=False)
        small = system.share(session.linear(block, name="small"), canonical=False)
        refs = [system.spawn(Holder) for _ in range(ACTORS)]
        for ref in refs:  # so that what each process needs once is not counted as the weight's
            ref.ask((small, _COLUMNS), timeout=_TIMEOUT_S)
        before = system.memory_report()
        for ref in refs:
            ref.ask((weight, _COLUMNS), timeout=_TIMEOUT_S)
        after = system.memory_report()
    grown = [after[name].private_bytes - before[name].private_bytes for name in after]
    return {
        "actors": ACTORS,
        "weight_bytes": weight.nbytes,
        "private_bytes_before": [one.private_bytes for one in before.values()],
        "private_bytes_after": [one.private_bytes for one in after.values()],
        "shared_bytes_after": [one.shared_bytes for one in after.values()],
        "private_growth_bytes": sum(grown),
        "private_total_bytes": sum(one.private_bytes for one in after.values()),
        "ten_copies_bytes": ACTORS * weight.nbytes,
    }


def judge(result: dict[str, Any]) -> list[verdict.Verdict]:
    """Return which targets are met: round trips, and the private memory of ten actors compared with ten copies."""
    found = [
        verdict.Verdict("round trip, µs", name, result["round_trips_us"][name]["median"], limit, is_most=True)
        for name, limit in TARGETS_US.items()
    ]
    shared = result["shared_weight"]
    for what in ("growth", "total"):
        part = shared[f"private_{what}_bytes"] / shared["ten_copies_bytes"]
        subject = f"{ACTORS} actors"
        found.append(verdict.Verdict(f"private {what} / copies", subject, part, SHARE, is_most=True))
    return found


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``actors.json``, and print medians and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks actors", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds and a small weight, for development")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ray = importlib.metadata.version("ray") if importlib.util.find_spec("ray") else None
    result: dict[str, Any] = {
        "peers": {"ray": {"installed": ray is not None, "version": ray}},
        "shared_weight": shared_weight(2 if options.quick else _COPIES),
        "round_trips_us": round_trips(5 if options.quick else 60),
    }
    judged = judge(result)
    result["verdicts"] = [one.to_json() for one in judged]
    written = record.write("actors", result, folder=record.BUILD if options.quick else record.RESULTS)
    for name, own in result["round_trips_us"].items():
        print(f"{name:<22}{own['median']:8.1f} µs  ({own['p10']:.1f} to {own['p90']:.1f})")
    shared = result["shared_weight"]
    print(f"weight {shared['weight_bytes'] / 1e6:.0f} MB, {ACTORS} actors: private memory grew by", end=" ")
    print(
        f"{shared['private_growth_bytes'] / 1e6:.1f} MB to {shared['private_total_bytes'] / 1e6:.1f} MB, all together"
    )
    for line in verdict.lines(judged):
        print(line)
    print(f"written: {written}")
