"""Runs of a table of cases against a backend, a bare function, or the core, in this process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import q4_conformance.checks  # noqa: F401  # which fills CHECKS
from q4_conformance.contract.case import CHECKS
from q4_conformance.contract.cases import cases_of, linear_cases, select_cases
from q4_conformance.contract.plain_cases import core_cases
from q4_conformance.measurement.recording import muted
from q4_conformance.outcome import CaseResult, FailureError, NotDeclaredError, NotTestableError, Outcome, Report
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.function import FunctionSubject
from q4_conformance.subjects.manifest import split
from q4_conformance.subjects.reference import REFERENCE
from q4core import BUILTIN_FORMATS, PathKind, Precision
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from q4_conformance.contract.case import Case
    from q4core import Backend, Format

_clock = time.perf_counter
"""Taken before a subject may put another in its place."""
_REFERENCE_KIND = PathKind.REFERENCE.value


def run_case(case: Case, subject: Any) -> CaseResult:
    """Run one case; every way of ending becomes a result."""
    started = _clock()
    ran: set[str] = getattr(subject, "ran", set())
    tried: set[str] = getattr(subject, "tried", set())
    ran.clear()
    tried.clear()
    try:
        with muted():
            message = CHECKS[case.check](case, subject)
        outcome = Outcome.PASS
    except FailureError as error:
        outcome, message = Outcome.FAIL, str(error)
    except NotDeclaredError as error:
        outcome, message = Outcome.NOT_DECLARED, str(error)
    except NotTestableError as error:
        outcome, message = Outcome.NOT_TESTABLE, str(error)
    except PLUGIN_FAULTS as error:  # whatever the subject raises, or exits with, is a failure
        outcome, message = Outcome.FAIL, describe_exception(error)
    is_reference = getattr(subject, "name", None) == REFERENCE or any(f"|{_REFERENCE_KIND}|" in path for path in ran)
    return CaseResult(
        case=case.id,
        contract=case.contract,
        outcome=outcome,
        message=message,
        seconds=_clock() - started,
        is_fallback=outcome is Outcome.PASS and is_reference,
        paths=sorted(ran | tried if outcome is Outcome.FAIL else ran),
    )


def _run(
    cases: tuple[Case, ...], subject: Any, name: str, watch: Callable[[CaseResult], object] = lambda _: None
) -> Report:
    due, undeclared = split(cases, subject)
    results: list[CaseResult] = []
    for case in due:
        results.append(run_case(case, subject))
        watch(results[-1])
    return Report(subject=name, expected=[case.id for case in due], results=results, undeclared=undeclared)


def run_cases(
    backend: Backend | str,
    formats: Iterable[str | Format] = tuple(BUILTIN_FORMATS),
    *,
    device: str = "cpu",
    only: Iterable[str] = (),
) -> Report:
    """Judge a backend by every case that concerns it.

    Args:
        backend: The backend, or the name of an installed one.
        formats: Formats to judge it on; cases of what it does not declare are counted and not run.
        device: Where to compute.
        only: Texts with which the ids to run start; none runs all.

    Raises:
        LookupError: No such backend is installed, or the reference is not.
    """
    subject = BackendSubject(backend, device=device)
    chosen = tuple(formats)
    return _run(select_cases(cases_of(chosen, device), only), subject, subject.name)


def check_linear(  # the facts of one run
    function: Callable[..., torch.Tensor],
    format: str | Format,  # noqa: A002  # what people call it
    *,
    only: Iterable[str] = (),
    cases: Iterable[Case] | None = None,
    watch: Callable[[CaseResult], object] = lambda _: None,
    **claims: Any,
) -> Report:
    """Judge a bare function ``fn(x, weight, bias) -> y`` by the cases that concern it.

    Args:
        function: Takes x [..., K], a ``PackedWeight`` and a bias [N] or None.
        format: The format to judge it on.
        only: As for ``run_cases``.
        cases: The cases to run, where they are not ``linear_cases([format])``: those, say, with weights of a size that
            the function takes.
        watch: Called with each result as it comes.
        **claims: What is claimed of the function: the fields of ``FunctionSubject``, such as
            ``precision=Precision.W4A8``, ``dtypes=[torch.bfloat16]`` or ``has_out=True``.
    """
    claims.setdefault("precision", Precision.W4A32)
    subject = FunctionSubject(function=function, **claims)
    chosen = linear_cases([format]) if cases is None else tuple(cases)
    return _run(select_cases(chosen, only), subject, subject.name, watch)


def check_core(*, only: Iterable[str] = ()) -> Report:
    """Judge the core and its reference path."""
    return _run(select_cases(core_cases(), only), None, "q4core")
