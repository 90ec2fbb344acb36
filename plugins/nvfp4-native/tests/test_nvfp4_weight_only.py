"""The backend in Triton's interpreter: NVFP4 and MXFP4 by the shared weight-only kernels, case by case."""

from __future__ import annotations

import attrs
import pytest
import torch

from q4_conformance import Case, Outcome, backend_cases, device_cases, linear_cases, run_case
from q4_conformance.subjects.backend import BackendSubject
from q4_nvfp4_native import Nvfp4Native
from q4_nvfp4_native.operands import OperandMeta
from q4_nvfp4_native.scaled_dot import product
from q4core import BUILTIN_FORMATS, ActivationPrecision, Feature, Request, WeightSpec, error_bound, quantize

pytestmark = [
    pytest.mark.interpreted,
    # numpy, which computes there, warns of the very overflows and NaNs that are tested.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]

# The kernels are the shared ones, whose own tests take every layout; here some of each format, and export.
EXACT = [
    case
    for table in (linear_cases, backend_cases, device_cases)
    for case in table(["nvfp4", "mxfp4"])
    if case.precision not in {ActivationPrecision.FP4, ActivationPrecision.INT8}
]
VALUES = {
    "TC-09/values/nvfp4-e4m3_mul-low_first-48x256b16-s0/bfloat16/exact",
    "TC-09/values/nvfp4-e4m3_div-low_first-48x256b16-row_global_scale-s0/bfloat16/exact",
    "TC-09/values/mxfp4-e8m0-low_first-48x256b32-s0/bfloat16/exact",
}
JUDGED = {"TC-10", "TC-14", "TC-16", "TC-17"}
"""Contracts that ``nox -s conformance`` judges in the interpreter: here in the long run alone."""
EXPORTED = {
    "nvfp4-e4m3_mul-low_first-48x256b16-s0",
    "nvfp4-plain-low_first-48x256b16-s0",
    "mxfp4-e8m0-low_first-48x256b32-s0",
}
"""Weights whose export each run sees; other orders and dtypes of scales are rebuilt by the same code."""
CASES = [case for case in EXACT if case.contract in {*JUDGED, "EX-16"} or case.id in VALUES]


LONG = {"TC-09/values/nvfp4-e4m3_mul-low_first-48x256b16-s0/bfloat16/exact"}
"""Of the values, those that the one with a global scale for each row, which divides, leaves little to show for."""


def _is_long(case: Case) -> bool:
    return (
        case.contract in JUDGED
        or case.id in LONG
        or (case.contract == "EX-16" and case.id.split("/")[2] not in EXPORTED)
    )


def test_the_cases_named_exist() -> None:
    """Every case that is picked by its id is there."""
    assert {case.id for case in CASES} >= VALUES
    assert {case.id.split("/")[2] for case in CASES if case.contract == "EX-16"} >= EXPORTED


@pytest.fixture(scope="module")
def subject() -> BackendSubject:
    """The backend as it is where TRITON_INTERPRET=1."""
    return BackendSubject(Nvfp4Native())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=pytest.mark.soak if _is_long(case) else ()) for case in CASES],
)
def test_case(case: Case, subject: BackendSubject) -> None:
    """The case passes by a kernel of ours; another codebook is said not to be served."""
    result = run_case(case, subject)
    is_served = Feature.CUSTOM_CODEBOOK not in case.weight_recipe.features
    assert result.outcome is (Outcome.PASS if is_served else Outcome.NOT_DECLARED), result
    assert not result.is_fallback


def test_paths_say_that_they_are_interpreted(subject: BackendSubject) -> None:
    """What is computed reads as the interpreter's, never as a GPU's; that of the quantiser, too."""
    request = Request.for_weight(quantize(torch.randn(8, 64), "nvfp4"))
    for asked in (request, attrs.evolve(request, op="quantize")):
        paths = subject.backend.check(asked).paths
        assert all(path.interpreted for path in paths)


@pytest.mark.parametrize(("rows", "columns", "in_features"), [(1, 1, 128), (130, 129, 256), (5, 70, 384)])
@pytest.mark.parametrize(
    ("name", "factor", "per_row"), [("mxfp4", 0, False), ("nvfp4", 0, False), ("nvfp4", 1, False), ("nvfp4", 2, True)]
)
def test_dot_scaled_product(  # the axes
    rows: int, columns: int, in_features: int, name: str, factor: int, per_row: bool
) -> None:
    """The kernel round dot_scaled is right in every index, tail, bias and factor; tl.dot stands in for it here."""
    block, low, high = (16, 8, 0x7F) if name == "nvfp4" else (32, 120, 134)
    generator = torch.Generator().manual_seed(rows)
    sizes = (rows, columns)
    codes = [torch.randint(0, 256, (n, in_features // 2), dtype=torch.uint8, generator=generator) for n in sizes]
    scales = [
        torch.randint(low, high, (n, in_features // block), dtype=torch.uint8, generator=generator) for n in sizes
    ]
    row_scales = torch.exp2(torch.randint(-3, 4, (rows,), generator=generator).to(torch.float32))
    bias = torch.randn(columns, generator=generator)
    global_scale = torch.rand(columns if per_row else 1, generator=generator) + 0.5
    run = product(None, name, factor, torch.float32)
    run.load()
    weight = quantize(torch.randn(columns, in_features, generator=generator), name)
    meta = OperandMeta(
        spec=WeightSpec.of(weight), scale_dtype=weight.scale.dtype, global_dtype=None, has_static_scale=False
    )
    out = torch.full((rows, columns), torch.nan)
    given = (codes[0], scales[0], row_scales.view(torch.uint8))
    run(given, (codes[1], scales[1]), global_scale if factor else None, bias, out, meta)
    left, right = (_decode(name, *pair) for pair in zip(codes, scales, strict=True))
    scale = global_scale.to(torch.float64)
    scale = torch.ones(1, dtype=torch.float64) if factor == 0 else scale if factor == 1 else 1 / scale
    wide = row_scales.to(torch.float64)[:, None] * scale
    exact = wide * (left @ right.T) + bias
    size = wide * (left.abs() @ right.abs().T) + bias.abs()
    assert bool(((out - exact).abs() <= error_bound(exact, size, in_features, torch.float32)).all())


def _decode(name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    form = BUILTIN_FORMATS[name]
    levels = torch.tensor(form.codebook, dtype=torch.float64)
    values = levels[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    dtype = torch.float8_e4m3fn if name == "nvfp4" else torch.float8_e8m0fnu
    return values * scales.view(dtype).to(torch.float64).repeat_interleave(form.block_size, 1)
