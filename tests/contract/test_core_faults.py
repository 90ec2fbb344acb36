"""Every fault planted in the core is caught, by the case that is meant to catch it."""

from __future__ import annotations

import re

import pytest

from q4_conformance import Outcome, backend_cases, core_cases, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance_faults import ToyKernel
from tests.support.broken_core import CORE_FAULTS, CoreFault


@pytest.mark.parametrize("fault", CORE_FAULTS, ids=lambda fault: fault.name)
def test_broken_core_is_caught(fault: CoreFault) -> None:
    """With the fault in the core the case meant for it fails, for the reason meant."""
    cases = [case for case in core_cases() if case.id == fault.caught_by]
    cases += [case for case in backend_cases(["nf4"]) if case.id.startswith(fault.caught_by)]
    (case,) = cases
    subject = None if case.profile == "core" else BackendSubject(ToyKernel())
    with fault.breaks():
        result = run_case(case, subject)
    assert result.outcome is Outcome.FAIL, result
    assert re.search(fault.says, result.message), result
