"""Fixtures of the actors' tests: systems on each runtime, the recorded events, and a program of two actors."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from acting import Stepper, actor_events

from q4_actors import ActorSystem
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUNTIMES = ["threads", *(["processes"] if sys.platform == "linux" else [])]
SHARED = Path("/dev/shm")  # noqa: S108  # where Linux keeps shared memory


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    """Return each runtime in turn."""
    return str(request.param)


@pytest.fixture
def system(runtime: str) -> Iterator[ActorSystem]:
    """Return a system that is stopped after the test."""
    with ActorSystem(runtime, mailbox=4, restarts=2) as made:
        yield made


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, dict[str, Any]]]]:
    """Return a function that gives the events of actors so far."""
    caplog.set_level(logging.DEBUG, logger="q4core")
    return lambda: actor_events(caplog)


def steps(
    runtime: str, folder: Path, *, half: bool = False, resume: Path | None = None, fatal: tuple[int, ...] = ()
) -> torch.Tensor:
    """Run two actors that read each other for 20 steps, or half of them, with some that are killed."""
    with ActorSystem(runtime, resume=resume, restarts=64) as system:
        states = [system.mutable(torch.arange(8.0) + index, name=f"s{index}") for index in range(2)]
        dies = system.mutable(torch.zeros(32, dtype=torch.uint8), name="dies", mode="in_place") if fatal else None
        refs = [system.spawn(Stepper, states[index], states[1 - index], fatal, dies) for index in range(2)]
        first = states[0].version + 1
        for step in range(first, 11 if half else 21):
            for ref in refs:  # one after the other reads, so that the order is the program's
                assert ref.ask(step, timeout=scaled(30.0)) == step
        if half:
            assert system.checkpoint(folder / "half.pt") == {"s0": 10, "s1": 10}
            assert system.clock == 10
        return torch.stack([state.snapshot().tensor for state in states])
