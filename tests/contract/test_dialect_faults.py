"""Every dialect here passes the cases of its profile, and each planted fault is caught by its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import q4core as q4
from q4_conformance import Outcome, dialect_cases, run_case
from q4_conformance.subjects.dialect import DialectSubject
from q4_conformance.subjects.profiles import cases_for, find_target, subject_for
from q4_conformance_faults import DIALECT_FAULTS, Fault, ToyDialect

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = [dialect.name for dialect in q4.dialects() if dialect.formats]
WITHOUT_GOLDEN = {
    *("awq", "awq-gemv", "comfyui-nvfp4", "deepseek-mxfp4", "gptq", "gptq-v2", "gptqmodel-bitsandbytes", "hqq", "mlx"),
    *("compressed-tensors-int8", "modelopt-int4", "torchao-int4", "torchao-int4-tile-packed", ToyDialect.name),
}
"""Dialects of which no golden file can be identified by its keys alone, or that no other library writes."""
READ_ONLY = {"gemma", "quark-mxfp4"}
"""Dialects that write nothing, so that their readers are judged by files of their owners alone."""
ALONE = {
    ("gemma", "int4"),
    ("gemma", "q8_0"),
    ("mlx", "q8_affine"),
    ("modelopt-int4", "int4"),
    ("quark-mxfp4", "mxfp4"),
}
"""Dialects and formats whose weights no other dialect here writes."""


@pytest.mark.parametrize("name", [*NAMES, ToyDialect.name])
def test_dialect_passes(name: str, install: Callable[..., None]) -> None:
    """A dialect, found by its name, passes every case; what it has no counterpart for is NOT_DECLARED."""
    install(ToyDialect.name)
    target = find_target(name)
    assert target.profile == "dialect"
    subject = subject_for(target)
    assert cases_for(target) == dialect_cases(target.formats)
    for case in dialect_cases(target.formats):
        result = run_case(case, subject)
        expected = {Outcome.PASS}
        is_golden = case.part == "golden" and name in WITHOUT_GOLDEN
        is_alone = case.part == "convert" and (name, case.format) in ALONE
        if is_golden or is_alone or (name in READ_ONLY and case.format):
            expected = {Outcome.NOT_DECLARED}
        assert result.outcome in expected, result


@pytest.mark.parametrize("fault", DIALECT_FAULTS, ids=lambda fault: fault.name)
def test_faulty_dialect_is_caught(fault: Fault, install: Callable[..., None]) -> None:
    """An installed dialect with the fault fails the case meant for it, for the reason meant."""
    install(fault.name)
    target = find_target(fault.name)
    (case,) = [case for case in cases_for(target) if case.id == fault.caught_by]
    result = run_case(case, subject_for(target))
    assert result.outcome is Outcome.FAIL, result
    assert fault.says in result.message


def test_a_format_that_is_not_declared_is_no_pass() -> None:
    """Asked for a format that it does not hold, a dialect is NOT_DECLARED in every case of it."""
    target = find_target("simple-nf4", formats=["mxfp4"])
    subject = DialectSubject("simple-nf4")
    ends = {case.id: run_case(case, subject).outcome for case in cases_for(target) if case.format}
    assert set(ends.values()) == {Outcome.NOT_DECLARED}
    assert len(ends) == 5
