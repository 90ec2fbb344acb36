"""The input gradient's numbers, in Triton's interpreter, against float64, and what the backend makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from triton_programs import BY_ROW, RECIPES

from q4_conformance import exact_input_gradient, judge
from q4_triton_kernels import Target, WeightOnlyBackend, prepare_weight
from q4_triton_kernels import gradient as gradients
from q4_triton_kernels.configs import config_for
from q4_triton_kernels.factory import twin_table
from q4_triton_kernels.interpreting import IGNORED_WARNINGS, hasten, require_interpreter
from q4_triton_kernels.schedule import GradientSchedule
from q4core import (
    Precision,
    PrepareContext,
    Registry,
    Request,
    ScaleKind,
    Segment,
    Session,
    SessionConfig,
    dequantize,
    error_bound,
    grid_activations,
    hookimpl,
)

if TYPE_CHECKING:
    from q4_conformance import WeightRecipe
    from q4_triton_kernels.schedule import Stretch

pytestmark = [pytest.mark.interpreted, *map(pytest.mark.filterwarnings, IGNORED_WARNINGS)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BY_ROW_DIVIDED = attrs.evolve(BY_ROW, scale_kind=ScaleKind.E4M3_DIV)


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    require_interpreter()
    hasten()


def _assert_right(recipe: WeightRecipe, dtype: torch.dtype, rows: int, out_dtype: torch.dtype | None = None) -> None:
    """Assert that every element is within the float32 bound, that of decoded weights as well as the kit's."""
    weight = recipe.build()
    out_dtype = out_dtype or dtype
    tensors, meta = prepare_weight(weight, PrepareContext("cpu"))
    is_by_row = gradients.has_row_globals(meta, tensors)
    found = gradients.gradient_for(meta, dtype, out_dtype, Target(None), torch.device("cpu"), is_by_row=is_by_row)
    found.load((rows, rows))
    precision = Precision.W4A32 if dtype is torch.float32 else Precision.W4A16
    grad = grid_activations(rows, weight.out_features, precision, dtype=dtype, seed=rows) / 16
    out = torch.full((rows, weight.in_features), torch.nan, dtype=out_dtype)
    found(tensors, grad, out)
    verdict = judge(out, exact_input_gradient(weight, grad), out_dtype=out_dtype)
    assert verdict.passed, verdict
    dense, wide = dequantize(weight, torch.float32).to(torch.float64), grad.to(torch.float64)
    bound = error_bound(wide @ dense, wide.abs() @ dense.abs(), weight.out_features, out_dtype)
    assert bool(((out.to(torch.float64) - wide @ dense).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_gradient(name: str, dtype: torch.dtype) -> None:
    """Rows that fill no tile, in either tile."""
    for rows in (1, 5, 70):
        _assert_right(RECIPES[name], dtype, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", [BY_ROW, BY_ROW_DIVIDED], ids=["times", "divided"])
def test_global_scales_by_row(recipe: WeightRecipe, dtype: torch.dtype) -> None:
    """A global scale of each out-feature's own is taken into the sum over out-features."""
    factor = recipe.build().global_scale
    assert factor is not None
    assert factor.numel() > 1
    _assert_right(recipe, dtype, 5)


@pytest.mark.parametrize(("n", "k"), [(1, 33), (3, 200), (17, 257), (33, 384), (130, 65)])
def test_sizes_that_fill_nothing(n: int, k: int) -> None:
    """Any N, and any K with blocks of INT4, the last of which may be shorter."""
    for dtype in DTYPES:
        _assert_right(attrs.evolve(RECIPES["int4_zero"], n=n, k=k, block_size=32), dtype, 3)


@pytest.mark.parametrize("block", [16, 48, 96, 128, 256, 300])
def test_block_sizes(block: int) -> None:
    """Blocks of a multiple of 16, and of the whole row."""
    recipe = attrs.evolve(RECIPES["int4"], n=40, k=288, block_size=block)
    for dtype in (torch.bfloat16, torch.float32):
        _assert_right(recipe, dtype, 3)


@pytest.mark.parametrize("name", ["nf4", "nvfp4"])
def test_split_sums(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A sum over N that is cut into parts is finished right, the global scale included, and in a fixed order."""
    cuts: list[int] = []
    parts = GradientSchedule.parts

    def note(schedule: GradientSchedule, stretch: Stretch, rows: int) -> tuple[int, int]:
        cuts.append(parts(schedule, stretch, rows)[0])
        return parts(schedule, stretch, rows)

    monkeypatch.setattr(GradientSchedule, "parts", note)
    _assert_right(attrs.evolve(RECIPES[name], n=600, k=128), torch.bfloat16, 3)
    assert cuts[0] > 1
    if name == "nvfp4":
        _assert_right(attrs.evolve(BY_ROW, n=600, k=128), torch.bfloat16, 3)
        assert cuts[1] > 1


def test_dtypes_in_and_out() -> None:
    """The gradient to y may be of another dtype than the one to x."""
    _assert_right(RECIPES["nf4"], torch.float32, 3, torch.bfloat16)
    _assert_right(RECIPES["nvfp4"], torch.bfloat16, 3, torch.float32)


def test_every_value_of_a_code_counts() -> None:
    """One out-feature alone gives its own weights back, to the last bit of float32 in the bfloat16 path as well."""
    weight = RECIPES["nf4"].build()
    tensors, meta = prepare_weight(weight, PrepareContext("cpu"))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = gradients.gradient_for(meta, dtype, torch.float32, Target(None), torch.device("cpu"), is_by_row=False)
        found.load((1, 16))
        grad = torch.zeros((4, weight.out_features), dtype=dtype)
        for row in range(4):
            grad[row, row * 7] = 1
        out = torch.empty((4, weight.in_features))
        found(tensors, grad, out)
        torch.testing.assert_close(out, dequantize(weight, torch.float32)[[0, 7, 14, 21]], rtol=2**-23, atol=0)


def test_the_configured_tiles_compute() -> None:
    """The tiles of real architectures give right numbers, not only the small ones of the interpreter."""
    for name, dtype in (("nf4", torch.bfloat16), ("nvfp4", torch.float16)):
        weight = attrs.evolve(RECIPES[name], n=144, k=256).build()
        tensors, meta = prepare_weight(weight, PrepareContext("cpu"))
        found = gradients.gradient_for(meta, dtype, dtype, Target(None), torch.device("cpu"), is_by_row=False)
        grad = grid_activations(4, 144, Precision.W4A16, dtype=dtype) / 16
        for tile in {item for arch in (80, 90, 100) for item in config_for(arch).gradient[found.code.family]}:
            program = found.code.program(tile, even=True)
            program.load()
            out = torch.empty((4, 256), dtype=dtype)
            table = twin_table(found.code.layout.values, torch.float32)
            span = -(-144 // tile.bn)
            shape = (4, 144, 256, meta.row_bytes, meta.blocks, 1, span)
            grid = (meta.row_bytes // 64, 1, 1)
            program(grid, grad, *tensors[:2], tensors[0], tensors[-1].float(), table, out, out.float(), *shape)
            assert judge(out, exact_input_gradient(weight, grad), out_dtype=dtype).passed


class Interpreted(WeightOnlyBackend):
    """A backend of two formats."""

    name = "interpreted"
    formats = frozenset({"nf4", "nvfp4"})
    scale_kinds = frozenset({ScaleKind.E4M3_MUL})


class _Plugin:
    """What brings the backend."""

    @hookimpl
    def q4_backends(self) -> list[object]:
        """Return it."""
        return [Interpreted()]


@pytest.mark.parametrize("recipe", [RECIPES["nf4"], RECIPES["nvfp4"], BY_ROW], ids=["nf4", "nvfp4", "by_row"])
def test_a_layer_trains_by_it(recipe: WeightRecipe) -> None:
    """The core finds it, proves it, and calls it in backward, in either tile."""
    weight = recipe.build()
    config = SessionConfig(gradients=True, compute_dtype=torch.bfloat16, backend="interpreted")
    session = Session(config, registry=Registry([("interpreted", _Plugin())]))
    layer = session.linear(weight, m=(16, 17))
    record = layer.diagnostics()
    assert [segment.path.name for segment in record.gradients] == ["gradient_w4a16"]
    assert record.gradients_refused == ()
    for rows in (16, 17):
        x = torch.randn(rows, weight.in_features).to(torch.bfloat16).requires_grad_()
        grad = grid_activations(rows, weight.out_features, Precision.W4A16, dtype=torch.bfloat16)
        layer(x).backward(grad)
        assert x.grad is not None
        assert judge(x.grad, exact_input_gradient(weight, grad), out_dtype=torch.bfloat16).passed


def test_prepare_compiles_the_requested_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program of the gradient is loaded without gradients; with them, those of the rows that are to be served."""
    loaded: list[tuple[int, int | None]] = []
    monkeypatch.setattr(gradients.Gradient, "load", lambda self, m: loaded.append(m))
    weight = RECIPES["nf4"].build()
    backend = Interpreted()
    request = Request.for_weight(weight, dtype=torch.bfloat16)
    backend.prepare(weight, request, PrepareContext("cpu"))
    assert loaded == []
    asked = attrs.evolve(request, gradients=True, op="input_gradient", m=(3, 9))
    (path,) = backend.check(asked).paths
    linear = Segment(3, 9, backend.check(request).paths[0])
    context = PrepareContext("cpu", paths=(linear,), gradient_paths=(Segment(3, 9, path),))
    backend.prepare(weight, attrs.evolve(request, gradients=True), context)
    assert loaded == [(3, 9)]
