"""Within one process, ``SharedMutableTensor`` keeps the contract of ``MutableTensor``: the same tests, run again."""

from __future__ import annotations

import abandonment
import pytest
import sharing
import test_mutable
import test_mutable_abandoned
import test_mutable_guards
import test_mutable_late
import test_mutable_lifetime
import test_mutable_races
import test_mutable_turns

from q4_actors import SharedMutableTensor

MODULES = [
    test_mutable,
    test_mutable_abandoned,
    test_mutable_turns,
    test_mutable_guards,
    test_mutable_late,
    test_mutable_lifetime,
    test_mutable_races,
]
DIFFERENT = {
    # Only for tensors on CUDA, or pretended to be.
    "test_device_is_waited_for_before_the_content_is_written_again",
    "test_cuda_work_of_a_writer_that_ended_is_over_before_the_next",
    "test_blocks_on_other_streams_follow_the_update",
    "test_reader_that_leaves_no_event_is_waited_for",
    "test_capture_is_for_an_address_that_stays",
    "test_device_that_fails_fails_the_update",
    "test_cuda_update_is_whole_on_every_stream",
    # It takes the turns among threads away; here readers and writers keep each other out without them.
    "test_own_guard_catches_a_missing_exclusion",
    # Torch itself refuses to resize this memory: test_memory_can_not_be_resized.
    "test_change_by_a_reader_is_found_out",
    "test_writer_may_change_values_only",
    # Slots are used again, so that a version does not outlive its readers: test_shared.py has what holds instead.
    "test_old_version_lives_as_long_as_its_reader",
    "test_versioned_read_block_may_be_left_late",
    "test_change_while_an_update_is_copied_is_found_out",
    "test_address_moves_or_stays",
    # A handle can be pickled, is called otherwise, and never takes a tensor uncopied.
    "test_copies_are_refused",
    "test_repr_says_what_it_is",
    "test_first_content_is_copied_unless_owned",
    "test_tensor_that_cannot_be_shared_is_refused",
}
SAME = {
    name: test
    for module in MODULES
    for name, test in vars(module).items()
    if name.startswith(("test_", "Test")) and callable(test) and name not in DIFFERENT
}
globals().update(SAME)


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the shared tensor in the place of the other."""
    for module in (*MODULES, sharing, abandonment):
        monkeypatch.setattr(module, "MutableTensor", SharedMutableTensor, raising=False)


def test_all_that_is_left_out_exists() -> None:
    """No test is left out by a name that no test has any more."""
    assert not DIFFERENT - {name for module in MODULES for name in vars(module)}
    assert len(SAME) > 70
