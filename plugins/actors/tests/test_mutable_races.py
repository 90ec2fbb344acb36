"""``MutableTensor`` under racing threads, and under any sequence of uses."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
import torch
from history import Recorder, violations
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sharing import LONG

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator


# -- races


def _torn(tensor: torch.Tensor) -> float | tuple[float, ...]:
    """Return the one value of a tensor that is read in two halves, or what was found instead."""
    half = tensor.numel() // 2
    values = set(tensor[:half].tolist())
    time.sleep(0)
    values |= set(tensor[half:].tolist())
    return values.pop() if len(values) == 1 else tuple(sorted(values))


class _Race:
    """Threads that write, read and take snapshots as fast as they can, and what they recorded."""

    writers, readers, rounds = 3, 4, 300

    def __init__(self, mode: MutableMode) -> None:
        self.state = MutableTensor(torch.zeros(64), mode=mode)
        self.recorder = Recorder()
        self.conflicts: list[int] = []
        self._is_versioned = mode is MutableMode.VERSIONED
        self._start = threading.Barrier(self.writers + self.readers + 1)
        self._begun = [threading.Event() for _ in range(self.readers)]
        self._is_done = threading.Event()

    def run(self, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            background = [*(pool.submit(self._read, begun) for begun in self._begun), pool.submit(self._snapshot)]
            for future in [pool.submit(self._write, index) for index in range(self.writers)]:
                future.result(2 * scaled(LONG))
            self._is_done.set()
            for future in background:
                future.result(scaled(LONG))
        finally:
            self._is_done.set()
            sys.setswitchinterval(interval)

    def _write(self, index: int) -> None:
        self._start.wait(scaled(LONG))
        for round_ in range(self.rounds):
            if round_ == self.rounds // 2:  # on a busy machine all updates may be done before a reader has begun
                assert all(begun.wait(scaled(LONG)) for begun in self._begun)
            fails = self._is_versioned and round_ % 7 == 0
            try:
                self._update(1.0 + index * self.rounds + round_, wait=index > 0, fails=fails)
            except q4.WriteConflictError:
                self.conflicts.append(index)
            except ZeroDivisionError:
                assert fails

    def _update(self, token: float, *, wait: bool, fails: bool) -> None:
        with self.recorder.record("write") as seen, self.state.write(wait=wait, timeout=scaled(LONG)) as tensor:
            tensor[:32] = token
            time.sleep(0)
            tensor[32:] = token
            if fails:
                raise ZeroDivisionError
            seen.update(version=self.state.version + 1, value=token)

    def _read(self, begun: threading.Event) -> None:
        """Read until no writer is left, and once more."""
        self._start.wait(scaled(LONG))
        is_last = False
        while not is_last:
            is_last = self._is_done.is_set()
            with self.recorder.record("read") as seen, self.state.read(timeout=scaled(LONG)) as view:
                seen.update(version=view.version, value=_torn(view.tensor))
            begun.set()

    def _snapshot(self) -> None:
        self._start.wait(scaled(LONG))
        while not self._is_done.is_set():
            with self.recorder.record("read") as seen:
                taken = self.state.snapshot(timeout=scaled(LONG))
                seen.update(version=taken.version, value=_torn(taken.tensor))
            self.state.wait(taken.version + 1, timeout=0.01)


def test_races_are_linearizable(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """Racing writers (some fail), readers and snapshots leave a history that one order explains (TC-13)."""
    race = _Race(mode)
    race.run(threads)
    history = race.recorder.operations
    assert violations(history, 0.0) == ()
    stats = race.state.stats()
    written = [operation for operation in history if operation.kind == "write"]
    assert len({operation.version for operation in history if operation.kind == "read"}) > 1
    assert stats.writes == race.state.version == len(written)
    assert stats.reads + stats.snapshots == len(history) - len(written)
    assert stats.conflicts == len(race.conflicts)
    assert set(race.conflicts) <= {0}
    assert len(written) >= (race.writers - 1) * race.rounds * 6 // 7


class _Unguarded:
    """A register as one would write it without a contract, for the judge to find out."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(64)
        self.version = 0

    @contextlib.contextmanager
    def write(self) -> Iterator[torch.Tensor]:
        yield self.tensor
        self.version += 1

    @contextlib.contextmanager
    def read(self, *, timeout: float) -> Iterator[Any]:
        yield self


def _half_way(threads: concurrent.futures.ThreadPoolExecutor, register: Any) -> tuple[str, ...]:
    """Let a reader come when half of an update is done, and judge the history."""
    recorder = Recorder()

    def read() -> None:
        with recorder.record("read") as seen, register.read(timeout=scaled(LONG)) as view:
            seen.update(version=view.version, value=_torn(view.tensor))

    with recorder.record("write") as seen, register.write() as tensor:
        tensor[:32] = 1.0
        late = threads.submit(read)
        concurrent.futures.wait([late], timeout=0.2)
        tensor[32:] = 1.0
        seen.update(version=1, value=1.0)
    late.result(scaled(LONG))
    return violations(recorder.operations, 0.0)


def test_half_an_update_is_never_seen(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """A reader in the middle of an update sees the whole version before it, or waits for the whole one after it."""
    assert _half_way(threads, MutableTensor(torch.zeros(64), mode=mode)) == ()


def test_torn_register_is_caught(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """The same probe finds a register without exclusion out."""
    (found,) = _half_way(threads, _Unguarded())
    assert "torn read of version 0" in found


def test_own_guard_catches_a_missing_exclusion(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """If turns were wrong, a reader that overlaps an update would get an error, not torn values."""
    state = MutableTensor(torch.zeros(64), mode=MutableMode.IN_PLACE)
    state._protocol.gate._excludes_readers = False
    with pytest.raises(q4.PoisonedError):
        _half_way(threads, state)


# -- any sequence of uses, one thread


class _Model(RuleBasedStateMachine):
    """Compares a tensor with a list of its versions."""

    mode: MutableMode

    def __init__(self) -> None:
        super().__init__()
        self.state = MutableTensor(torch.zeros(3), mode=self.mode)
        self.versions = [[0.0] * 3]
        self.is_poisoned = self.is_closed = False
        self.held: list[tuple[Any, int]] = []

    def _is_refused(self) -> type[q4.Q4Error] | None:
        if self.is_closed:
            return q4.LifecycleError
        return q4.PoisonedError if self.is_poisoned else None

    def _is_writable(self) -> type[q4.Q4Error] | None:
        return self._is_refused() or (q4.WriteConflictError if self.held else None)

    def _expect(self, refusal: type[q4.Q4Error] | None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if refusal is None else pytest.raises(refusal)

    @rule(index=st.integers(0, 2), value=st.integers(-8, 8))
    def write(self, index: int, value: int) -> None:
        refusal = self._is_writable()
        with self._expect(refusal), self.state.write() as tensor:
            tensor[index] = value
        if refusal is None:
            new = list(self.versions[-1])
            new[index] = float(value)
            self.versions.append(new)

    @rule(value=st.integers(-8, 8))
    def fail(self, value: int) -> None:
        refusal = self._is_writable()
        with pytest.raises(refusal or ZeroDivisionError), self.state.write() as tensor:  # noqa: PT012  # the block is the subject
            tensor[0] = value
            raise ZeroDivisionError
        if refusal is None and self.mode is MutableMode.IN_PLACE:
            self.is_poisoned = True

    @rule(values=st.lists(st.integers(-8, 8), min_size=2, max_size=4))
    def replace(self, values: list[int]) -> None:
        fits = len(values) == 3
        refusal = self._is_writable() if fits else q4.InputError
        with self._expect(refusal):
            self.state.replace(torch.tensor(values, dtype=torch.float32))
        if refusal is None:
            self.versions.append([float(value) for value in values])

    @rule(value=st.none() | st.integers(-8, 8))
    def reset(self, value: int | None) -> None:
        refusal: type[q4.Q4Error] | None = None
        if self.is_closed or not self.is_poisoned:
            refusal = q4.LifecycleError
        elif self.held:
            refusal = q4.WriteConflictError
        with self._expect(refusal):
            self.state.reset(None if value is None else torch.full((3,), float(value)))
        if refusal is None:
            self.versions.append([float(value or 0)] * 3)
            self.is_poisoned = False

    @rule()
    def read(self) -> None:
        with self._expect(self._is_refused()), self.state.read() as view:
            assert (view.version, view.tensor.tolist()) == (len(self.versions) - 1, self.versions[-1])

    @rule()
    def snapshot(self) -> None:
        with self._expect(self._is_refused()):
            taken = self.state.snapshot()
            assert (taken.version, taken.tensor.tolist()) == (len(self.versions) - 1, self.versions[-1])
            taken.tensor.fill_(99.0)

    @rule(offset=st.integers(-2, 2))
    def wait(self, offset: int) -> None:
        version = len(self.versions) - 1 + offset
        refusal = self._is_refused()
        if refusal is None and offset > 0 and self.held and self.mode is MutableMode.IN_PLACE:
            refusal = q4.WriteConflictError
        with self._expect(refusal):
            assert self.state.wait(version, timeout=0) == (offset <= 0)

    @precondition(lambda self: len(self.held) < 3)
    @rule()
    def hold(self) -> None:
        block = self.state.read()
        with self._expect(self._is_refused()):
            self.held.append((block.__enter__(), len(self.versions) - 1))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 2))
    def release(self, index: int) -> None:
        view, _ = self.held.pop(index % len(self.held))
        view.__exit__(None, None, None)

    @precondition(lambda self: len(self.versions) > 3)
    @rule()
    def close(self) -> None:
        self.state.close()
        self.is_closed = True

    @invariant()
    def held_views_stay(self) -> None:
        for view, version in self.held:
            assert (view.version, view.tensor.tolist()) == (version, self.versions[version])

    @invariant()
    def facts_hold(self) -> None:
        assert (self.state.is_closed, self.state.is_poisoned) == (self.is_closed, self.is_poisoned)
        assert self.state.stats().writes == len(self.versions) - 1
        if not self.is_closed:
            assert self.state.version == len(self.versions) - 1


class _Versioned(_Model):
    mode = MutableMode.VERSIONED


class _InPlace(_Model):
    mode = MutableMode.IN_PLACE


TestVersionedSequences = _Versioned.TestCase
TestInPlaceSequences = _InPlace.TestCase
TestVersionedSequences.settings = TestInPlaceSequences.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
