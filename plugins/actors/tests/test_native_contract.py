"""By atomics ``SharedMutableTensor`` keeps the contract that it keeps by locks: the core's own tests, run again."""

from __future__ import annotations

import abandonment
import pytest
import sharing
import test_shared
import test_shared_threads
import torch

from q4_actors import MutableMode, SharedMutableTensor, process_locks
from q4_actors.native_rows import NativeRows

DIFFERENT = {
    # They reach for the locks that are not used here.
    "test_late_reader_finds_the_newest_version",
    "test_system_that_refuses_is_a_typed_error",
    # It takes the turns among threads away; here readers and writers keep each other out without them.
    "test_own_guard_catches_a_missing_exclusion",
}
NAMED = {name: test for name, test in vars(test_shared).items() if name.startswith("test_")}
SAME = {name: test for name, test in {**test_shared_threads.SAME, **NAMED}.items() if name not in DIFFERENT}
globals().update(SAME)
own_names = test_shared.own_names


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the shared tensor in the place of the other."""
    for module in (*test_shared_threads.MODULES, sharing, abandonment):
        monkeypatch.setattr(module, "MutableTensor", SharedMutableTensor, raising=False)


def test_atomics_are_what_is_tested(mode: MutableMode) -> None:
    """Where the plugin is installed, a tensor has them unless it is told otherwise."""
    with SharedMutableTensor(torch.zeros(4), mode=mode) as made, SharedMutableTensor.attach(made.segment) as joined:
        assert isinstance(made._content, NativeRows)
        assert isinstance(joined._content, NativeRows)


def test_nobody_asks_for_a_lock(mode: MutableMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads, snapshots and updates that have nobody to wait for take no lock of the system's."""

    def refuse(*_: object) -> None:
        raise AssertionError("a lock was asked for")

    made = SharedMutableTensor(torch.zeros(4), mode=mode)
    with made as state, SharedMutableTensor.attach(state.segment) as other:
        for method in ("try_shared", "try_exclusive", "release", "is_taken"):
            monkeypatch.setattr(process_locks.ProcessLocks, method, refuse)
        for value in range(1, 6):
            for one in (state, other):
                with one.write() as tensor:
                    tensor.fill_(value)
                one.replace(torch.full((4,), float(value)))
                assert sharing.content_of(other) == one.snapshot().tensor.tolist() == [value] * 4
        monkeypatch.undo()
        assert (other.version, other.stats().reads, other.stats().snapshots) == (20, 10, 5)


def test_all_that_is_left_out_exists() -> None:
    """No test is left out by a name that no test has any more."""
    assert not DIFFERENT - {*test_shared_threads.SAME, *NAMED}
    assert len(SAME) > 100
