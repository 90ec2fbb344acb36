"""``Watch``: when a process stays awake for the next message, and when it sleeps."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import TYPE_CHECKING

import pytest

from q4_actors.runtimes import watch as watching
from q4_actors.runtimes.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are for Linux")


class Yields:
    """Counts how often a core is offered to others, and does something then."""

    def __init__(self) -> None:
        self.count = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self) -> None:
        """Count."""
        self.count += 1
        self.meanwhile()


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> Yields:
    """Count yields of a machine with two cores, where a spin lasts long enough to be seen."""
    made = Yields()
    monkeypatch.setattr(os, "sched_yield", made)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(watching, "SPIN_S", 5.0)
    monkeypatch.setattr(watching, "SHORT_S", 10.0)
    monkeypatch.setattr(watching, "STALL_S", 10.0)
    return made


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Give both ends of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def receive(watch: Watch, pipe: tuple[int, int]) -> None:
    """Take a message that is there already, which is a short wait."""
    os.write(pipe[1], b"x")
    assert watch.wait(0.0)
    assert os.read(pipe[0], 1) == b"x"


def test_first_wait_sleeps(pipe: tuple[int, int], yields: Yields) -> None:
    """A first wait sleeps, for the time that was given."""
    started = time.monotonic()
    assert not Watch(pipe[0]).wait(0.05)
    assert time.monotonic() - started >= 0.05
    assert yields.count == 0


def test_spins_after_a_short_wait(pipe: tuple[int, int], yields: Yields) -> None:
    """Who has been answered at once looks again and again, offers the core between, and sees what comes."""
    watch = Watch(pipe[0])
    receive(watch, pipe)
    yields.meanwhile = lambda: yields.count == 3 and os.write(pipe[1], b"y")
    assert watch.wait()
    assert yields.count == 3


def test_no_spinning_after_a_long_wait(pipe: tuple[int, int], yields: Yields, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that was not short is the last that spins, until there is a short one again."""
    watch = Watch(pipe[0])
    receive(watch, pipe)
    monkeypatch.setattr(watching, "SHORT_S", 0.0)
    assert not watch.wait(0.02)
    spun, yields.count = yields.count, 0
    assert spun > 0
    assert not watch.wait(0.02)
    assert yields.count == 0
    monkeypatch.setattr(watching, "SHORT_S", 10.0)
    receive(watch, pipe)
    assert not watch.wait(0.02)
    assert yields.count > 0


def test_rests_after_a_stall(pipe: tuple[int, int], yields: Yields, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another thread held the core for long, no wait spins for a multiple of that time, and then they do."""
    watch = Watch(pipe[0])
    receive(watch, pipe)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    yields.meanwhile = lambda: pass_time(11.0)  # also the end of the spin
    assert not watch.wait(0.0)
    assert yields.count == 0  # there was no time for it
    assert not watch.wait(0.001)
    spun, yields.meanwhile = yields.count, lambda: pass_time(1.0)
    assert spun == 1
    for seconds in (0.0, 11.0 * watching.REST - 1):
        pass_time(seconds)
        receive(watch, pipe)
        assert not watch.wait(0.001)
    assert yields.count == spun
    pass_time(2.0)
    receive(watch, pipe)
    assert not watch.wait(0.001)
    assert yields.count > spun


def test_one_core(pipe: tuple[int, int], yields: Yields, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one core no wait spins: the answering process needs it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    watch = Watch(pipe[0])
    receive(watch, pipe)
    assert not watch.wait(0.01)
    assert yields.count == 0
    assert not select.select([pipe[0]], [], [], 0)[0]
