"""By atomics ``SharedMutableTensor`` keeps the contract between processes: the core's own tests, run again."""

from __future__ import annotations

import test_shared_processes

DIFFERENT = {
    # Of the mode that has no atomics.
    "test_writer_that_waits_for_readers_is_the_one_that_is_named",
}
NAMED = {name: test for name, test in vars(test_shared_processes).items() if name.startswith("test_")}
globals().update({name: test for name, test in NAMED.items() if name not in DIFFERENT})
content, process = test_shared_processes.content, test_shared_processes.process


def test_all_that_is_left_out_exists() -> None:
    """No test is left out by a name that no test has any more."""
    assert not DIFFERENT - set(NAMED)
    assert len(NAMED) == 21
