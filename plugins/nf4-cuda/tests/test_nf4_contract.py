"""The kernels, interpreted on the CPU, pass the cases of the kit that concern them; without CUDA they refuse."""

from __future__ import annotations

import itertools

import pytest
import torch

from q4_conformance import Case, Outcome, backend_cases, linear_cases, program_cases, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.manifest import split
from q4_nf4_cuda import Nf4Cuda
from q4_triton_kernels import Facts
from q4_triton_kernels.interpreting import IGNORED_WARNINGS, hasten, require_interpreter
from q4core import (
    BackendUnavailableError,
    ComputePath,
    PathKind,
    Precision,
    ReasonCode,
    Request,
    Session,
)

FORMATS = ("nf4", "fp4", "q4_0", "q4_1", "iq4_nl", "int4")
INTERPRETED = Facts(torch_cuda=None, is_cuda_available=False, driver=None, triton=None, is_interpreted=True)
"""Where the manifest declares the CPU."""
LONG = {
    "threads",
    "counts",
    "long",
    "tiles",
    "neighbours",
    "rows",
    "awkward",
    "shapes",
    "wide",
    "many",
    "modes",
    "compile",
    "kind",
    "copies",
}
"""Parts that an interpreted kernel needs many seconds for: by the marker ``soak``."""
MANY = {"calls", "varied", "frozen", "dispose", "elsewhere", "wide", "many"}
"""Parts of thousands of calls or rows, or of other processes, which an interpreter does not get through."""
CASES = [
    case
    for case in split((*linear_cases(FORMATS), *backend_cases(FORMATS)), BackendSubject(Nf4Cuda(INTERPRETED)))[0]
    if case.part not in MANY
]


@pytest.fixture(scope="module")
def subject() -> BackendSubject:
    """The backend, in a process whose kernels are interpreted."""
    require_interpreter()
    hasten()
    return BackendSubject("nf4-cuda")  # the installed one: copies of layers look for their backend by its name


def _is_common(case: Case, seen: set[tuple[str, str]]) -> bool:
    """Say whether each run takes a case: the first of its part, for a table and for zero points."""
    key = (case.weight_recipe.format.name, f"{case.contract}/{case.part}")
    is_here = key[0] == "nf4" or (key[0] == "int4" and case.part in ZERO)
    is_first = key not in seen and is_here and case.part not in LONG and case.contract not in JUDGED
    seen |= {key} if is_first else set()
    return is_first


JUDGED = {"TC-04", "TC-05", "TC-10", "TC-12", "TC-14", "TC-16", "TC-17"}
"""Contracts that ``nox -s conformance`` judges in the interpreter: here in the long run alone."""
ZERO = {"values"}
"""Parts that each run takes for zero points, too; the kernels' own tests multiply, add and differentiate with these."""


def _marked() -> list[object]:
    """Return what each run takes, and with the mark ``soak`` each other case in one dtype, which turns."""
    seen: set[tuple[str, str]] = set()
    found: list[object] = []
    for number, (_, group) in enumerate(itertools.groupby(CASES, lambda case: case.id.rsplit("/", 2)[0])):
        alike = [*group]
        for index, case in enumerate(alike):
            is_common = _is_common(case, seen)
            if is_common or index == number % len(alike):
                found.append(pytest.param(case, id=case.id, marks=() if is_common else pytest.mark.soak))
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize("case", _marked())
@pytest.mark.filterwarnings(*IGNORED_WARNINGS)
def test_case(case: Case, subject: BackendSubject) -> None:
    """The case passes by a kernel of ours; the table holds what the manifest declares alone."""
    result = run_case(case, subject)
    assert result.outcome is Outcome.PASS, result
    assert not result.is_fallback


@pytest.mark.interpreted
def test_an_interpreted_path_is_marked(subject: BackendSubject) -> None:
    """What the interpreter computes is never taken for a GPU's: each path says so."""
    case = next(case for case in CASES if case.check == "values")
    verdict = subject.backend.check(subject.request(case.weight()))
    assert all(path.interpreted for path in verdict.paths)


@pytest.mark.parametrize("name", FORMATS)
def test_the_cpu_is_refused_at_once(name: str) -> None:
    """TC-17: named by override under KERNEL_ONLY, a backend for CUDA alone refuses the CPU with its reason."""
    weight = next(case for case in linear_cases([name]) if case.check == "values").weight()
    subject = BackendSubject(Nf4Cuda())
    config = subject.config(compute_path=ComputePath.KERNEL_ONLY)
    with Session(config, registry=subject.registry) as session, pytest.raises(BackendUnavailableError) as caught:
        session.linear(weight)
    rejection = next(item for item in caught.value.rejections if item.backend == "nf4-cuda")
    assert [reason.code for reason in rejection.reasons] == [ReasonCode.DEVICE]


def test_without_cuda_the_reason_is_reported() -> None:
    """On this machine, which may have no GPU, the backend answers for a CUDA device instead of raising."""
    case = next(case for case in CASES if case.check == "values")
    request = Request.for_weight(case.weight(), device="cuda:0", dtype=torch.bfloat16)
    verdict = Nf4Cuda().check(request)
    if torch.cuda.is_available():
        assert {path.precision for path in verdict.paths} == {Precision.W4A16}
        assert {path.kind for path in verdict.paths} == {PathKind.KERNEL, PathKind.DEQUANT}
    else:
        assert {reason.code.domain for reason in verdict.reasons} == {"hardware"}


SPIKING = [case for case in program_cases(("nf4",)) if case.contract == "EX-25" and case.part != "forked"]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.part, marks=pytest.mark.soak if case.part in {"rounds", "pages", "packed"} else ())
        for case in SPIKING
    ],
)
@pytest.mark.filterwarnings(*IGNORED_WARNINGS)
def test_spiking_programs(case: Case, subject: BackendSubject) -> None:
    """Operations of spiking networks have the oracle's bits, one by one, in rounds, and at the ends of memory."""
    result = run_case(case, subject)
    assert result.outcome is Outcome.PASS, result.message
