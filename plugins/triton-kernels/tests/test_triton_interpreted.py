"""The kernels' numbers, in Triton's interpreter, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from triton_programs import RECIPES

from q4_conformance import exact_linear, judge
from q4_triton_kernels import ARCHITECTURES, Target, WeightMeta, prepare_weight
from q4_triton_kernels import plan as plans
from q4_triton_kernels import schedule as schedules
from q4_triton_kernels.configs import GemmTile, GemvTile, config_for
from q4_triton_kernels.interpreting import IGNORED_WARNINGS, hasten, require_interpreter
from q4core import Precision, PrepareContext, grid_activations

if TYPE_CHECKING:
    from q4_conformance import WeightRecipe
    from q4_triton_kernels.plan import Plan

pytestmark = [pytest.mark.interpreted, *map(pytest.mark.filterwarnings, IGNORED_WARNINGS)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    require_interpreter()
    hasten()


def _plan(meta: WeightMeta, dtype: torch.dtype) -> Plan:
    return plans.plan_for(meta, dtype, dtype, Target(None), torch.device("cpu"))


def _assert_right(recipe: WeightRecipe, dtype: torch.dtype, kind: str, rows: int, *, has_bias: bool = False) -> None:
    """Assert that a kind of path computes every element within the float32 bound."""
    weight = recipe.build()
    tensors, meta = prepare_weight(weight, PrepareContext("cpu"))
    plan = _plan(meta, dtype)
    plan.load(frozenset({kind}), (rows, rows))
    precision = Precision.W4A32 if dtype is torch.float32 else Precision.W4A16
    x = grid_activations(rows, weight.in_features, precision, dtype=dtype, seed=rows) / 16
    bias = torch.linspace(-2, 2, weight.out_features).to(dtype) if has_bias else None
    out = torch.full((rows, weight.out_features), torch.nan, dtype=dtype)
    getattr(plan, kind)(tensors, x, out, bias)
    verdict = judge(out, exact_linear(weight, x, bias), out_dtype=dtype)
    assert verdict.passed, verdict


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_gemv(name: str, dtype: torch.dtype) -> None:
    """One row of x, and several in the tile for eight."""
    for rows in (1, 2, 5):
        _assert_right(RECIPES[name], dtype, "gemv", rows, has_bias=rows == 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_gemm(name: str, dtype: torch.dtype) -> None:
    """Rows of x that fill no tile."""
    for rows in (9, 70):
        _assert_right(RECIPES[name], dtype, "gemm", rows, has_bias=rows == 9)


@pytest.mark.parametrize("name", RECIPES)
def test_dequant(name: str) -> None:
    """Dense weights, a library GEMM and the finish, for bfloat16; in float16 where one term holds the weights."""
    _assert_right(RECIPES[name], torch.bfloat16, "dequant", 11, has_bias=True)
    if name == "nvfp4":
        _assert_right(RECIPES[name], torch.float16, "dequant", 11)


@pytest.mark.parametrize("name", ["nf4", "q4_1", "nvfp4"])
def test_dense_weights_are_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A weight that is too large to be dense at once is multiplied in pieces, each with its own bias and scales."""
    made: list[torch.Tensor] = []
    empty = torch.empty

    def watched(*arguments: Any, **named: Any) -> torch.Tensor:
        place = empty(*arguments, **named)
        made.append(place)
        return place

    monkeypatch.setattr(plans, "_DENSE_BYTES", 30_000)
    monkeypatch.setattr(plans, "_DENSE_STEP", 16)
    recipe = attrs.evolve(RECIPES[name], n=50, k=256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", watched)
        _assert_right(recipe, torch.bfloat16, "dequant", 11, has_bias=True)
    dense, sums = (place for place in made if place.ndim == 1 and place.numel() > 1)
    assert (dense.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
    assert dense.numel() < 50 * 256 * (1 if name == "nvfp4" else 2)
    assert dense.nbytes + sums.nbytes <= 30_000


@pytest.mark.parametrize("kind", ["gemv", "gemm"])
@pytest.mark.parametrize("name", ["nf4", "int4_zero", "nvfp4"])
def test_split_sums(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """A sum over K that is cut into parts is finished right, bias and global scale included, and in a fixed order."""
    monkeypatch.setattr(schedules, "_LEAST_SPAN", 1)
    for cache in (schedules._stretches, plans.plan_for):
        cache.cache_clear()
    recipe = attrs.evolve(RECIPES[name], n=5, k=2304)
    weight = recipe.build()
    rows = 3 if kind == "gemv" else 12
    _, meta = prepare_weight(weight, PrepareContext("cpu"))
    plan = _plan(meta, torch.bfloat16)
    assert plan.schedule.parts(plan.schedule.at(kind, rows), rows)[0] > 1
    _assert_right(recipe, torch.bfloat16, kind, rows, has_bias=True)


@pytest.mark.parametrize("kind", ["gemv", "gemm"])
@pytest.mark.parametrize(("n", "k"), [(1, 33), (3, 200), (17, 257), (33, 384)])
def test_sizes_that_fill_nothing(n: int, k: int, kind: str) -> None:
    """Any N, and any K with blocks of INT4."""
    rows = 2 if kind == "gemv" else 10
    for dtype in (torch.float32, torch.bfloat16):
        _assert_right(attrs.evolve(RECIPES["int4_zero"], n=n, k=k, block_size=32), dtype, kind, rows)


@pytest.mark.parametrize("block", [16, 48, 96, 128, 256, 300])
def test_block_sizes(block: int) -> None:
    """Blocks of a multiple of 16, and of the whole row."""
    recipe = attrs.evolve(RECIPES["int4"], n=6, k=288, block_size=block)
    _assert_right(recipe, torch.bfloat16, "gemv", 1)
    _assert_right(recipe, torch.bfloat16, "gemm", 10)
    _assert_right(recipe, torch.bfloat16, "dequant", 10)


def _tiles(kind: str) -> list[tuple[str, GemvTile | GemmTile]]:
    """Return every tile of every architecture once, as interpreted code sees it: warps and stages change nothing."""
    found: dict[tuple[str, GemvTile | GemmTile], None] = {}
    for arch in ARCHITECTURES:
        config = config_for(arch)
        families: dict[str, Any] = {"gemv": config.gemv} if kind == "gemv" else config.gemm
        for family, items in families.items():
            for tile in items:
                plain = attrs.evolve(tile, warps=1, stages=1)
                found[family, plain if isinstance(plain, GemvTile) else attrs.evolve(plain, m=None)] = None
    return list(found)


SEEN_BY = {"weights": ("nvfp4", torch.bfloat16), "blocks": ("nf4", torch.bfloat16), "wide": ("nf4", torch.float32)}


@pytest.mark.parametrize(("family", "tile"), [*_tiles("gemv"), *_tiles("gemm")], ids=str)
def test_the_configured_tiles_compute(family: str, tile: GemvTile | GemmTile) -> None:
    """Each tile of a real architecture gives right numbers, not only the small ones of the interpreter."""
    name, dtype = SEEN_BY.get(family, ("nf4", torch.bfloat16))
    is_gemv = isinstance(tile, GemvTile)
    rows, features = (tile.rows, tile.r + 3) if isinstance(tile, GemvTile) else (tile.bm + 3, tile.bn + 5)
    weight = attrs.evolve(RECIPES[name], n=features, k=512).build()
    tensors, meta = prepare_weight(weight, PrepareContext("cpu"))
    plan = _plan(meta, dtype)
    precision = Precision.W4A32 if dtype is torch.float32 else Precision.W4A16
    x = grid_activations(rows, 512, precision, dtype=dtype) / 16
    make: Any = plan.factory.gemv if is_gemv else plan.factory.gemm
    program = make(tile, even=True, final=True)
    program.load()
    span = meta.row_bytes // (16 if is_gemv else 64)
    route = plans._Route(program, True, plan.schedule.blocks(tile, rows), 1, span)
    out = torch.full((rows, features), torch.nan, dtype=dtype)
    plan._launch(route, torch.float32 if is_gemv else dtype, tensors, x, out, None)
    assert judge(out, exact_linear(weight, x), out_dtype=dtype).passed
