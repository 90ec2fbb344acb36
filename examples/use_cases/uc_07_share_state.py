"""UC-07: actors share a tensor that changes, memory stays where it was, and closed sessions give every byte back.

    python examples/use_cases/uc_07_share_state.py

It needs actors, kernels for CPUs, and layers that train: pip install "q4core[actors,cpu,nn]"
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import torch
from acceptance import ROOM, Acceptance, held_bytes

import q4core as q4
from q4_actors import Actor, ActorSystem, MutableMode, MutableTensor
from q4_nn import linear_ste

if TYPE_CHECKING:
    from collections.abc import Callable

STATEMENTS = (
    (
        "No reader sees half an update, versions only grow, one writes at a time, in both modes, from threads and "
        "processes."
    ),
    "Ten thousand calls and a thousand training steps leave memory where it was.",
    "Closed sessions give every byte back.",
)
SIZE, WRITERS, READERS, UPDATES, READS = 4096, 2, 3, 200, 400
SETTLED = 0.2
"""Share of a loop after which memory is first read: what is made once is there by then."""


class Writer(Actor):
    """Adds 1 to every element, in two halves with a pause between them."""

    def __init__(self, state: MutableTensor) -> None:
        self.state, self.torn = state, 0

    def on_receive(self, updates: int) -> int:
        """Make so many updates; return how many began with a content that was not whole."""
        for _ in range(updates):
            with self.state.write(wait=True) as tensor:
                self.torn += int(tensor[0] != tensor[-1])
                tensor[: SIZE // 2] += 1
                time.sleep(0)
                tensor[SIZE // 2 :] += 1
        return self.torn


class Reader(Actor):
    """Reads, and counts what must not be."""

    def __init__(self, state: MutableTensor) -> None:
        self.state, self.torn, self.back, self.last = state, 0, 0, 0

    def on_receive(self, reads: int) -> tuple[int, int]:
        """Read so often; return how many contents were not that of their version, and how often versions fell."""
        for _ in range(reads):
            with self.state.read() as view:
                self.torn += int(not bool((view.tensor == view.version).all()))
                self.back += int(view.version < self.last)
                self.last = view.version
        return self.torn, self.back


def race(case: Acceptance) -> None:
    """Let writers and readers race, by every runtime of one machine, in both modes."""
    lines, right = [], []
    runtimes = ("threads", "processes") if sys.platform == "linux" else ("threads",)
    for runtime in runtimes:
        for mode in (MutableMode.VERSIONED, MutableMode.IN_PLACE):
            with ActorSystem(runtime) as system:
                state = system.mutable(torch.zeros(SIZE), name="state", mode=mode)
                writers = [system.spawn(Writer, state, name=f"writer-{number}") for number in range(WRITERS)]
                readers = [system.spawn(Reader, state, name=f"reader-{number}") for number in range(READERS)]
                for writer in writers:
                    writer.tell(UPDATES)
                for reader in readers:
                    reader.tell(READS)
                torn = [writer.ask(0, timeout=300.0) for writer in writers]  # answers once the work before it is done
                seen = [reader.ask(0, timeout=300.0) for reader in readers]
                version, content = state.version, state.snapshot().tensor
            right.append(torn == [0] * WRITERS and seen == [(0, 0)] * READERS)
            right.append(version == WRITERS * UPDATES and bool((content == version).all()))
            lines.append(
                f"{runtime}, {mode.value}: {WRITERS * UPDATES} updates of {WRITERS} writers, {READERS * READS} reads: "
                f"{sum(torn) + sum(item for item, _ in seen)} torn, {sum(item for _, item in seen)} back in time, "
                f"{WRITERS * UPDATES - version} updates lost"
            )
    case.judge(STATEMENTS[0], *lines, holds=all(right))


def growth(times: int, call: Callable[[], object]) -> int:
    """Return by how many bytes this process grows, from a fifth of the calls to their end."""
    held = []
    for number in range(1, times + 1):
        call()
        if number in {int(times * SETTLED), times}:
            held.append(held_bytes() or 0)
    return held[1] - held[0]


def endure(case: Acceptance) -> None:
    """Call, update and train, again and again."""
    if held_bytes() is None:
        case.leave(STATEMENTS[1], "memory is read from /proc, on Linux")
        return
    x, master = torch.randn(16, 64), torch.randn(64, 64, requires_grad=True)
    optimizer = torch.optim.SGD([master], lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        linear_ste(x, master, format="nf4").square().mean().backward()
        optimizer.step()

    with q4.Session(q4.SessionConfig(device="cpu")) as session, MutableTensor(torch.zeros(SIZE), name="state") as state:
        layer = session.linear(q4.quantize(torch.randn(256, 64), "nf4"))

        def update() -> None:
            with state.write() as tensor:
                tensor.add_(1.0)

        loops = {
            "calls of a layer": (10_000, lambda: layer(x), layer(x).nbytes),
            "updates of a shared tensor": (10_000, update, SIZE * 4),
            "steps of training": (1_000, train, master.nbytes),
        }
        lines, right = [], []
        for what, (times, call, each) in loops.items():
            grown, leak = growth(times, call), int((1 - SETTLED) * times) * each
            right.append(grown < ROOM < leak)
            lines.append(f"{times:,} {what}: {grown:+,} bytes; one result left by each would be {leak:+,}")
    case.judge(STATEMENTS[1], *lines, holds=all(right))


def open_and_close() -> tuple[list[q4.Q4Linear], int]:
    """Return the layers of a session that is closed, and the bytes that they held before."""
    session = q4.Session(q4.SessionConfig(device="cpu"))
    layers = [session.linear(q4.quantize(torch.randn(1024, 1024), "nf4")) for _ in range(32)]
    prepared = sum(item.prepared_bytes for item in session.report().layers)
    session.close()
    return layers, prepared


def close(case: Acceptance) -> None:
    """Prepare many layers and close their session; once before that, so that what is made once is there."""
    open_and_close()
    before = held_bytes()
    layers, prepared = open_and_close()
    left = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
    lines = [f"{len(layers)} layers held {prepared:,} bytes; after close() they hold {left:,}"]
    right = [left == 0 < prepared]
    try:
        layers[0](torch.ones(1, 1024))
        right.append(False)
    except q4.LifecycleError as error:
        lines.append(f"a call after that: {error}")
    if before is not None and (after := held_bytes()) is not None:
        lines.append(f"the process holds {after - before:+,} bytes more than before")
        right.append(after - before < ROOM < prepared)
    case.judge(STATEMENTS[2], *lines, holds=all(right))


def main() -> int:
    """Judge each statement."""
    case = Acceptance("UC-07: Share mutable state between actors, for as long as they live")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # operations are so small that threads would wait for each other
    race(case)
    endure(case)
    close(case)
    return case.end()


if __name__ == "__main__":
    sys.exit(main())
