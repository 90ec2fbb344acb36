"""Kernels pass the cases of the kit that concern kernels, also those of instruction sets that do not serve here."""

from __future__ import annotations

import pytest
import torch

from q4_conformance import Case, Outcome, backend_cases, linear_cases, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance.subjects.manifest import split
from q4_cpu_native import CpuNative
from tests.support.cpu_layers import ISAS

CASES = split((*linear_cases(), *backend_cases()), BackendSubject(CpuNative()))[0]
OTHERS = {isa for isa in ISAS if isa != CpuNative("").isa}
"""Instruction sets that do not serve here: the one that does is judged by every case in ``nox -s conformance``."""
CHOSEN = {"avx2": tuple(sorted(CpuNative.capabilities.formats)), "avxvnni": ("nf4",), "avx512": ("int4",)}
"""Formats in every run; AVX2 is in each, so that a run is the same on each machine."""
KERNELS = {"values", "noise", "non_finite", "zero_inputs", "bias", "last_page", "thread_counts"}
"""Checks of what differs between instruction sets: the kernels. How they are called is the same code for all."""
LARGE = {"long", "wide", "many", "tiles", "counts"}
"""Parts of sizes, of seconds each, that the first of the chosen formats alone goes through in every run."""
LONG_ROW = 8192


def _is_in_every_run(isa: str, case: Case) -> bool:
    recipe = case.weight_recipe
    is_kernels = case.check in KERNELS and case.dtype is torch.float32
    is_large = case.part in LARGE or recipe.k > LONG_ROW
    formats = CHOSEN[isa][:1] if is_large else CHOSEN[isa]
    return isa in {"avx2", *OTHERS} and recipe.format.name in formats and is_kernels


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
