"""By atomics ``SharedMutableTensor`` keeps the contract between processes: the core's own tests, run again."""

from __future__ import annotations

import test_shared_processes

NAMED = {name: test for name, test in vars(test_shared_processes).items() if name.startswith("test_")}
globals().update(NAMED)
content, process = test_shared_processes.content, test_shared_processes.process


def test_there_are_tests_to_run_again() -> None:
    """All tests of the locks between processes."""
    assert len(NAMED) == 21
