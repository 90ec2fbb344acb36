"""A right memory provider passes every case of its profile, and each planted fault is caught by its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from q4_conformance import Outcome, memory_cases, run_case
from q4_conformance.subjects.memory import MemorySubject
from q4_conformance.subjects.profiles import cases_for, find_target, subject_for
from q4_conformance_faults import PROVIDER_FAULTS, Fault, ToyProvider
from q4core import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4_conformance import Case

CASES = memory_cases()


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_provider_passes(case: Case, install: Callable[..., None]) -> None:
    """The toy provider, found by its name, passes the case."""
    install("toy-memory")
    target = find_target("toy-memory")
    assert target.profile == "memory"
    assert cases_for(target) == CASES
    result = run_case(case, subject_for(target))
    assert result.outcome is Outcome.PASS, result


@pytest.mark.parametrize("fault", PROVIDER_FAULTS, ids=lambda fault: fault.name)
def test_faulty_provider_is_caught(fault: Fault, install: Callable[..., None]) -> None:
    """An installed provider with the fault fails the case meant for it, for the reason meant."""
    install(fault.name)
    subject = subject_for(find_target(fault.name))
    (case,) = [case for case in CASES if case.id == fault.caught_by]
    result = run_case(case, subject)
    assert result.outcome is Outcome.FAIL, result
    assert fault.says in result.message


def test_a_provider_without_its_hardware_is_not_testable() -> None:
    """Where the provider says no, what needs its memory is NOT_TESTABLE, with the attributes; refusals are judged."""

    class _Unable(ToyProvider):
        def is_available(self, device: torch.device) -> memory.Availability:
            return memory.Availability(is_available=False, reason=f"none on {device}", attributes={"managedMemory": 0})

    subject = MemorySubject(_Unable())
    ends = {case.id: run_case(case, subject) for case in CASES}
    for name in ("TC-07/promoted", "TC-21/convert", "TC-21/empty", "TC-22/mutable", "TC-23/storage"):
        assert ends[name].outcome is Outcome.NOT_TESTABLE, ends[name]
        assert "managedMemory = 0" in ends[name].message
    for name in ("TC-07/capability", "TC-08/refused"):
        assert ends[name].outcome is Outcome.PASS, ends[name]
