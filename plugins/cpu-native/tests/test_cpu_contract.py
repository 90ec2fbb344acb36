"""The kernels pass every case of the kit that concerns them, for every format."""

from __future__ import annotations

import pytest
import torch

from q4_conformance import Case, Outcome, backend_cases, linear_cases, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.manifest import split
from q4_cpu_native import CpuNative
from q4core import BUILTIN_FORMATS

CASES = split((*linear_cases(), *backend_cases()), BackendSubject(CpuNative()))[0]
ISAS = [isa for isa in ("avx2", "avxvnni", "avx512") if CpuNative(isa).isa]
CHOSEN = {"avx2": tuple(BUILTIN_FORMATS), "avxvnni": ("nf4",), "avx512": ("int4",)}
"""Formats in every run; the instruction set that serves here is certified on all of them."""
SLOW = {"calls", "varied_calls", "train_through", "dispose", "elsewhere", "kind", "compile"}
"""Checks of what is the same for each format and instruction set: in every run of one of both."""
SIZES = {"long", "wide", "rows", "counts", "neighbours", "tiles", "many"}
"""Parts about how work is divided, which is the same for each dtype of x: in every run of float32 alone."""


def _is_in_every_run(isa: str, case: Case) -> bool:
    name = case.weight_recipe.format.name
    is_again = case.part in SIZES and case.dtype is not torch.float32
    return name in CHOSEN[isa] and not is_again and (case.check not in SLOW or (isa, name) == ("avx2", "nf4"))


PAIRS = [
    pytest.param(isa, case, id=f"{isa}-{case.id}", marks=[] if _is_in_every_run(isa, case) else pytest.mark.soak)
    for isa in ISAS
    for case in CASES
]


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest) -> BackendSubject:
    """The backend with each instruction set that this machine has, under a name that no installed one has."""
    backend = CpuNative(request.param)
    backend.name = f"cpu-native-{request.param}"
    return BackendSubject(backend)


def test_the_baseline_runs_here() -> None:
    """A machine without AVX2 would leave the cases below empty: then this says so."""
    assert "avx2" in ISAS


@pytest.mark.parametrize(("subject", "case"), PAIRS, indirect=["subject"])
def test_case(case: Case, subject: BackendSubject) -> None:
    """The case passes by a kernel of ours; the table holds what the manifest declares alone."""
    result = run_case(case, subject)
    assert result.outcome is Outcome.PASS, result
    assert not result.is_fallback
