"""The judge of TC-13 catches planted faults of mutable tensors in recorded histories, and passes a right one."""

from __future__ import annotations

import pytest

from q4_actors import MutableMode
from q4_conformance.checks.mutable import judge_race
from q4_conformance.outcome import FailureError
from q4_conformance_faults import MUTABLE_FAULTS, Fault
from q4_conformance_faults.mutables import Register, SharedRegister


@pytest.mark.parametrize("fault", MUTABLE_FAULTS, ids=lambda fault: fault.name)
def test_faulty_mutable_tensor_is_caught(fault: Fault) -> None:
    """A torn write, a stale read, a lost update and a read without exclusion are found in what actors saw."""
    with pytest.raises(FailureError, match=fault.says):
        judge_race(fault.make, (MutableMode.IN_PLACE,))


def test_a_right_register_passes() -> None:
    """One lock around everything is linearizable."""
    assert judge_race(Register, (MutableMode.IN_PLACE,)).startswith("600 updates, ")


def test_a_right_register_between_processes_passes() -> None:
    """One lock around everything is linearizable between processes as well."""
    assert judge_race(SharedRegister, tuple(MutableMode), has_processes=True).startswith("600 updates, ")
