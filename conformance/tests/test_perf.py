"""Measuring: weights come from memory, beside yardsticks that no cache keeps, and shares are of the best of the run."""

from __future__ import annotations

import pytest
import torch

from q4_conformance.measurement import perf
from q4_conformance.measurement.perf import Memory, figures, rounds

CPU = torch.device("cpu")


class Machine:
    """A machine with a clock of its own, whose memory moves so many bytes per second."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.now = 0.0
        self.order: list[str] = []

    def clock(self) -> float:
        """Tell seconds."""
        return self.now

    def move(self, what: str, size: int) -> None:
        """Let the time pass that so many bytes take."""
        self.order.append(what)
        self.now += size / self.speed


class FakeMemory(Memory):
    """Memory of a fake machine: copies and reads take what its speed says."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(CPU, machine.clock, 4096)
        self.machine = machine

    def speeds(self) -> tuple[float, float]:
        """Copying takes twice as long as reading."""
        started = self.machine.now
        self.machine.move("memory", 1 << 20)
        speed = (1 << 20) / (self.machine.now - started)
        return speed / 2, speed


def test_no_weight_is_used_twice_without_the_caches_cleared_between() -> None:
    """Each round goes over memory first, then over each weight once."""
    machine = Machine(1e9)
    calls = [lambda name=name: machine.move(name, 1000) for name in "abc"]
    found = rounds(calls, FakeMemory(machine), 0.0)
    assert machine.order == ["memory", "a", "b", "c"] * 3
    assert [len(turn.samples) for turn in found] == [2, 2, 2]


def test_a_disturbed_machine_makes_no_share_larger() -> None:
    """A kernel that reads as fast as memory does has a share of 1, and one that is disturbed for a while no more."""
    machine = Machine(2e9)
    memory = FakeMemory(machine)

    def call() -> None:
        machine.move("weight", 1 << 20)

    calm = rounds([call, call], memory, 0.0, least=4)
    told = figures(calm, 1 << 20, 0)
    assert told["share_of_read"] == pytest.approx(1.0)
    assert told["share_of_copy"] == pytest.approx(2.0)
    machine.speed = 1e9
    told = figures(calm + rounds([call, call], memory, 0.0, least=5), 1 << 20, 0)
    assert told["share_of_read"] == pytest.approx(0.5)
    assert told["read_gb_per_s"] == 2.0
    assert told["p10_us"] < told["p90_us"]


@pytest.mark.parametrize(("cache", "size"), [(1 << 20, 128 << 20), (48 << 20, 192 << 20), (1 << 30, 1 << 30)])
def test_buffers_are_larger_than_several_caches(monkeypatch: pytest.MonkeyPatch, cache: int, size: int) -> None:
    """Four caches, where that is neither little nor more than a machine should be asked for."""
    monkeypatch.setattr(perf, "cache_bytes", lambda _: cache)
    monkeypatch.setattr(torch, "ones", lambda count, **_: torch.empty(count, device="meta"))
    assert Memory(CPU).size == size


def test_copying_counts_both_ways_and_the_best_turn_is_taken() -> None:
    """Of three turns of each the fastest speaks: the others were disturbed."""
    times = iter([0, 4, 10, 12, 20, 28, 30, 31, 40, 42, 50, 54])
    assert Memory(CPU, lambda: float(next(times)), 1 << 20).speeds() == (float(1 << 20), float(1 << 20))


def test_this_machine_says_how_large_its_cache_is() -> None:
    """It is more than a kilobyte, and less than the memory."""
    assert 1 << 10 < perf.cache_bytes(CPU) < 1 << 36
