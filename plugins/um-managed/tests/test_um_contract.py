"""The provider, on pretended machines, passes every case of the kit's memory profile; without hardware it says so."""

from __future__ import annotations

import pytest
from pretended_driver import CONCURRENT, GB10, LEGACY, missing, pretend

from q4_conformance import Case, Outcome, memory_cases, run_case
from q4_conformance.subjects.memory import MemorySubject
from q4_um_managed import ManagedProvider

CASES = memory_cases()
WITHOUT_HARDWARE = {"TC-07/capability", "TC-08/refused"}
"""What is judged where there is no managed memory; the rest needs some."""


def test_there_are_cases() -> None:
    """The profile holds the cases that a provider is certified by."""
    assert {case.id.split("/")[0] for case in CASES} >= {"TC-07", "TC-08", "TC-21", "TC-22", "TC-23"}


@pytest.mark.parametrize("attributes", [CONCURRENT, GB10], ids=["discrete", "GB10"])
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_it_passes(case: Case, attributes: dict[str, int]) -> None:
    """Over a pretended driver, which hands out real host memory, each case passes."""
    result = run_case(case, MemorySubject(pretend(attributes).provider))
    assert result.outcome is Outcome.PASS, result


@pytest.mark.parametrize(
    "provider",
    [pretend(LEGACY).provider, missing(), ManagedProvider()],
    ids=["not concurrent", "no driver", "CPU here"],
)
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_without_hardware_it_is_not_testable(case: Case, provider: ManagedProvider) -> None:
    """Where there is no memory for a device, refusals are judged and pass; all else is NOT_TESTABLE, never a pass."""
    subject = MemorySubject(provider, device="cpu")
    expected = Outcome.PASS if case.id in WITHOUT_HARDWARE or subject.availability() else Outcome.NOT_TESTABLE
    result = run_case(case, subject)
    assert result.outcome is expected, result
