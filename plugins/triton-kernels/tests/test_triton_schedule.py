"""What a self-probe runs holds for every program that a layer launches."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from triton_programs import BY_ROW, RECIPES

from q4_triton_kernels import ARCHITECTURES, Facts, Target, WeightMeta, WeightOnlyBackend
from q4_triton_kernels.configs import config_for
from q4_triton_kernels.gradient import Gradient, gradient_for
from q4_triton_kernels.layout import half_of, padded_row_bytes
from q4_triton_kernels.plan import plan_for
from q4_triton_kernels.schedule import gemm_tile, gradient_schedule_for, schedule_for
from q4core import Feature, KernelPath, Request, ScaleKind
from q4core.selection.probe_results import ProbeResults, row_counts

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from q4_triton_kernels.program import Program
    from q4core import PackedWeight

PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 103: 148, 120: 170, 121: 48}
SIDES = (32, 64, 96, 128, 384, 1024, 2048, 4096, 8192, 14336, 28672, 33, 1000, 4100)
ROWS = sorted({*range(1, 11), *(2**i + j for i in range(4, 13) for j in (0, 1)), 25, 100, 529, 100_000})
LAYERS = (
    ("nf4", 64), ("int4", 128), ("int4", 32), ("int4_zero", 128), ("nvfp4", 16), ("int4", 300), ("int4", 4096),
    ("by_row", 16),
)  # fmt: skip
RANGES = ((1, None), (1, 1), (20, 40), (3, 700), (513, None))


class Every(WeightOnlyBackend):
    """A backend of the formats whose programs differ."""

    name = "every"
    formats = frozenset({"nf4", "int4", "nvfp4"})
    scale_kinds = frozenset({ScaleKind.E4M3_MUL})


def _backend(arch: int) -> Every:
    return Every(
        Facts(
            torch_cuda="13.0",
            is_cuda_available=True,
            driver=13000,
            triton="3.7.1",
            capability=lambda index: divmod(arch, 10),
            processors=lambda index: PROCESSORS[arch],
        )
    )


@functools.cache
def _weight(recipe: str, block: int) -> PackedWeight:
    return attrs.evolve(RECIPES.get(recipe, BY_ROW), block_size=block).build()


def _meta(recipe: str, block: int, n: int, k: int) -> WeightMeta:
    """Return the layout of a weight that is not made."""
    given = WeightMeta.of(_weight(recipe, block))
    spec = attrs.evolve(given.spec, out_features=n, in_features=k, block_size=block)
    return attrs.evolve(given, spec=spec, half=half_of(block, k), row_bytes=padded_row_bytes(k))


def _request(recipe: str, block: int, n: int, k: int, m: tuple[int, int | None], dtype: torch.dtype) -> Request:
    weight = _weight(recipe, block)
    own = Request.for_weight(weight, device="cuda:0", dtype=dtype, m=m)
    return attrs.evolve(own, out_features=n, in_features=k, block_size=block)


def _launched(meta: WeightMeta, request: Request, target: Target, path: KernelPath, rows: int) -> list[Hashable]:
    """Return what ``linear``, or ``input_gradient``, launches for a number of rows, and how it branches."""
    if request.op == "input_gradient":
        gradient = _gradient(meta, request, target)
        is_cut = gradient.schedule.at("gradient", rows).is_cut  # no constant of the program
        return [(_facts(item), is_cut) for item in gradient.programs((rows, rows))]
    plan = plan_for(meta, request.dtype, request.out_dtype, target, request.device)
    kind = path.name.partition("_")[0]
    if kind == "dequant":
        return [_facts(item) for item in plan.programs(kind, (rows, rows))]
    route = plan._route(kind, rows, {})
    return [_facts(route.program), *([_facts(plan.factory.finish)] if route.splits > 1 else [])]


def _gradient(meta: WeightMeta, request: Request, target: Target) -> Gradient:
    # As ``has_row_globals`` says of the prepared tensors, which are not made here.
    is_by_row = Feature.ROW_GLOBAL_SCALE in request.features
    return gradient_for(meta, request.out_dtype, request.dtype, target, request.device, is_by_row=is_by_row)


@functools.cache
def _facts(program: Program) -> Hashable:
    """Return all that a program is compiled from."""
    named = tuple(program.signature.items()), tuple(program.constants.items())
    return program.name, *named, program.aligned, program.warps, program.stages


def _layers(arch: int) -> Iterator[tuple[str, int, int, int, torch.dtype]]:
    for place, ((recipe, block), n, k) in enumerate(itertools.product(LAYERS, SIDES, SIDES)):
        if half_of(block, k):
            yield recipe, block, n, k, (torch.bfloat16, torch.float16, torch.float32)[(place + arch) % 3]


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=pytest.mark.soak if arch in {86, 89, 103} else ()) for arch in ARCHITECTURES]
)
def test_every_program_that_a_layer_launches_has_been_probed(arch: int) -> None:
    """Whatever N, K, format, dtype and rows: the proof that a layer is served by has seen each of its programs.

    As in the core, a layer is probed where its rows have not been seen under its key.
    """
    backend, target = _backend(arch), Target(arch, PROCESSORS[arch])
    book: dict[Hashable, tuple[set[int], set[Hashable]]] = {}
    for recipe, block, n, k, dtype in _layers(arch):
        meta = _meta(recipe, block, n, k)
        for m in RANGES:
            request = _request(recipe, block, n, k, m, dtype)
            gradient = attrs.evolve(request, op="input_gradient", gradients=True)
            asked = [(one, path) for one in (request, gradient) for path in backend.check(one).paths]
            for one, path in asked:
                low, high = max(m[0], path.m[0]), min((end for end in (m[1], path.m[1]) if end), default=None)
                if high is not None and low > high:
                    continue
                seen, programs = book.setdefault(ProbeResults.key(backend.name, path, one), (set(), set()))
                wanted = row_counts(path, (low, high))
                if not seen.issuperset(wanted):
                    seen.update(wanted)
                    programs.update(item for rows in wanted for item in _launched(meta, one, target, path, rows))
                served = [rows for rows in ROWS if rows >= low and (high is None or rows <= high)]
                launched = {item for rows in served for item in _launched(meta, one, target, path, rows)}
                assert launched <= programs, (str(one), path, wanted)


@pytest.mark.parametrize("arch", [*ARCHITECTURES, None])
def test_every_program_is_loaded_before_it_is_launched(arch: int | None) -> None:
    """What ``prepare`` loads for a range of rows holds what ``linear`` launches there."""
    target = Target(arch, PROCESSORS.get(arch or 0, 8))
    for n, k in itertools.product(SIDES, SIDES):
        meta = _meta("nf4", 64, n, k)
        plan = plan_for(meta, torch.bfloat16, torch.bfloat16, target, torch.device("cuda", 0))
        for kind, first, last in (("gemv", 1, 8), ("gemm", 9, 8), ("gemm", 20, 600), ("gemm", 9, 9)):
            m = (first, None if last < first else last)
            loaded = {_facts(item) for item in plan.programs(kind, m)}
            for rows in (rows for rows in ROWS if rows >= first and (m[1] is None or rows <= m[1])):
                assert _facts(plan._route(kind, rows, {}).program) in loaded
        gradient = gradient_for(meta, torch.bfloat16, torch.bfloat16, target, torch.device("cuda", 0), is_by_row=False)
        loaded = {_facts(item) for item in gradient.programs((1, None))}
        assert all(_facts(item) in loaded for rows in ROWS for item in gradient.programs((rows, rows)))


@pytest.mark.parametrize("arch", [*ARCHITECTURES, None])
def test_probes_stay_few_and_small(arch: int | None) -> None:
    """Each path names at most eight numbers of rows up to 1025, and shapes of a model fall into few kinds."""
    target = Target(arch, PROCESSORS.get(arch or 0, 8))
    variants = set()
    for family, tiles in config_for(arch).gemm.items():
        assert len(tiles) <= 4
        for n, k in itertools.product(SIDES, SIDES):
            plan = plan_for(_meta("nf4", 64, n, k), torch.bfloat16, torch.bfloat16, target, torch.device("cuda", 0))
            schedule = attrs.evolve(plan.schedule, family=family)
            for kind in ("gemv", "gemm"):
                rows = schedule.probe_rows(kind)
                assert len(rows) <= 8
                assert max(rows) <= 1025
                assert {item.low for item in schedule.stretches(kind)} <= set(rows)
                if (n, k) in {(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (6144, 4096)}:
                    variants.add((family, kind, schedule.variant(kind)))
    assert len(variants) <= 3 * 2 * 4


@pytest.mark.parametrize("arch", [*ARCHITECTURES, None])
def test_the_last_tile_is_probed_with_three_blocks_of_rows(arch: int | None) -> None:
    """The tile for any number of rows is proven where its blocks of rows are three, the last of one row or more.

    Whatever the shape, in gemm and in the input gradient, its sum cut or not.
    """
    processors = PROCESSORS.get(arch or 0, 8)
    for n, k in itertools.product(SIDES, SIDES):
        for family in config_for(arch).gemm:
            schedules = {
                "gemm": schedule_for(arch, family, n, k, 64, processors),
                "gradient": gradient_schedule_for(arch, family, n, k, processors),
            }
            for kind, schedule in schedules.items():
                last = schedule.stretches(kind)[-1]
                rows = [item for item in schedule.probe_rows(kind) if item >= last.low]
                assert any(-(-item // gemm_tile(last.tile).bm) >= 3 for item in rows), (kind, family, n, k, rows)
