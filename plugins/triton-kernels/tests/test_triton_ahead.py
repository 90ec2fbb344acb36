"""Ahead of time, without a device: which instructions the kernels become, and that they fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
import triton
from compiling import compiled_aside, selected
from triton_programs import LIKE, RECIPES, Candidate, candidates

from q4_triton_kernels import ARCHITECTURES
from q4_triton_kernels.configs import config_for

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from compiling import Became, Compiling

    from q4_triton_kernels.program import Program

SHARED_BYTES = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
    121: 101_376,
}
"""The most shared memory that one block may have (CUDA C++ Programming Guide, technical specifications)."""
TENSOR_INSTRUCTIONS = {9: "wgmma.mma_async", 10: "tcgen05.mma", 8: "mma.sync", 12: "mma.sync"}
_FROM_REGISTERS = re.compile(r"wgmma\.mma_async[^{]*\{[^}]*\},\s*\{")
_WGMMA = re.compile(r"wgmma\.mma_async\.sync")


CHOSEN = [item for arch in ARCHITECTURES for item in candidates(arch)]
OTHERS = [item for arch in ARCHITECTURES for item in candidates(arch, every=True)]


@pytest.fixture(scope="module")
def compiling(request: pytest.FixtureRequest) -> Iterator[Compiling]:
    """What the candidates of the selected tests become, compiled on every core."""
    with compiled_aside(selected(request, "candidate")) as found:
        yield found


def _check(candidate: Candidate, became: Became) -> None:
    """Assert what must hold for every program: it does something, and nothing lies in local memory.

    Products in float32, which run without tensor cores, may spill: for some formats ptxas keeps 8 to 72 bytes in local
    memory at 72 to 128 registers of 255, and which formats these are changes with tile, warps and stages alike.
    Triton 3.6, the oldest that we promise, has a ptxas that keeps 8 bytes of one product in bfloat16.
    """
    assert "trap;" not in became.ptx
    assert re.search(r"\.local|ld\.local|st\.local", became.ptx) is None
    if candidate.kind not in {"gemm", "gradient"} or candidate.dtype is not torch.float32:
        is_spilt = triton.__version__.startswith("3.6.") and str(candidate) == "sm103-gemm-2-q4_1-bf16"
        assert (became.usage.stack_bytes, became.usage.spill_bytes) == ((8, 8) if is_spilt else (0, 0)), became.usage
    alike = [arch for arch, other in LIKE.items() if other == candidate.arch]
    assert became.shared_bytes <= min(SHARED_BYTES[arch] for arch in (candidate.arch, *alike))
    program = candidate.program()
    if candidate.kind == "gemv" and candidate.even:
        vectors = re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", became.ptx)
        of_x = program.constants["ROWS"] * (8 if program.signature["x_ptr"] == "*fp32" else 4)
        assert len(vectors) >= program.constants["R"] + of_x, "codes must be loaded 16 bytes at a time, as x is"
    if candidate.kind in {"gemm", "gradient"}:
        if candidate.dtype is torch.float32:
            assert "tf32" not in became.ptx
        else:
            assert TENSOR_INSTRUCTIONS[candidate.arch // 10] in became.ptx


def _family(program: Program) -> str:
    """Return the family that a gemm or a gradient was compiled for, from what it is compiled from alone."""
    given = program.signature.get("x_ptr") or program.signature["d_ptr"]
    return "wide" if given == "*fp32" else "weights" if program.constants["WEIGHTS"] else "blocks"


def _matrix_facts(program: Program) -> Hashable:
    constants = program.constants
    return _family(program), constants["BN"], constants["BM"], program.warps, program.stages


def _of(programs: list[Program], kernel: str) -> list[Program]:
    return [program for program in programs if program.name == kernel]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_run_compiles_each_configuration(arch: int) -> None:
    """Whatever is left to the long run: each tile of each family, each kernel and each format is compiled in every run.

    A gradient by a global scale of each row takes the tiles of ``blocks``, and each family meets two dtypes once. One
    that has the tiles of another meets each format by itself.
    """
    config = config_for(arch)
    own = {item.recipe for item in CHOSEN if (item.arch, item.kind) == (arch, "gemv")}
    assert own == set(RECIPES)
    like = LIKE.get(arch, arch)
    assert attrs.evolve(config_for(like), measured=config.measured, dequant_above=config.dequant_above) == config
    chosen = [item for item in CHOSEN if item.arch == like]
    programs = [item.program() for item in chosen]
    gemv = {
        (*(program.constants[name] for name in ("ROWS", "R", "T")), program.warps, program.stages)
        for program in _of(programs, "gemv")
    }
    assert gemv >= {(tile.rows, tile.r, tile.t, tile.warps, tile.stages) for tile in config.gemv}
    for kernel, families in (("gemm", config.gemm), ("gradient", config.gradient)):
        tiles = {
            (family, tile.bn, tile.bm, tile.warps, tile.stages) for family, own in families.items() for tile in own
        }
        assert {_matrix_facts(program) for program in _of(programs, kernel)} >= tiles
    gradients = _of(programs, "gradient")
    by_row = {_matrix_facts(program)[1:] for program in gradients if program.constants["BY_ROW"]}  # type: ignore[index]  # a tuple
    assert by_row >= {(tile.bn, tile.bm, tile.warps, tile.stages) for tile in config.gradient["blocks"]}
    mixed = {_family(program) for program in gradients if program.signature["d_ptr"] != program.signature["out_ptr"]}
    assert mixed == set(config.gradient)
    dense = {(program.constants["R"], program.warps, program.constants["TERMS"]) for program in _of(programs, "dense")}
    assert dense == {(config.dense_rows, config.dense_warps, terms) for terms in (1, 2)}
    finish = {
        (*(program.constants[name] for name in ("BM", "BN", "GLOBAL")), program.warps)
        for program in _of(programs, "finish")
    }
    assert finish == {(config.finish_rows, config.finish_columns, kind, config.finish_warps) for kind in (0, 1)}
    for kernel in ("gemv", "gemm"):
        assert {item.recipe for item in chosen if item.kind == kernel} == set(RECIPES)


@pytest.mark.parametrize("candidate", CHOSEN, ids=str)
def test_compiles(candidate: Candidate, compiling: Compiling) -> None:
    """Each kernel compiles in each configuration, without spills, with wide loads and tensor instructions."""
    _check(candidate, compiling[candidate])


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("candidate", OTHERS, ids=str)
def test_compiles_too(candidate: Candidate, compiling: Compiling) -> None:
    """The same for every tile with every format, in bfloat16."""
    _check(candidate, compiling.take(candidate))


HOPPER = [item for item in CHOSEN if item.arch == 90 and item.kind == "gemm" and "32" not in str(item.dtype)]


@pytest.mark.parametrize("candidate", HOPPER, ids=str)
def test_hopper_feeds_weights_from_registers(candidate: Candidate, compiling: Compiling) -> None:
    """On sm_90 each wgmma takes its weights from registers, and nothing was stored to shared memory before the last."""
    ptx = compiling[candidate].ptx
    found = len(_WGMMA.findall(ptx))
    assert found
    assert len(_FROM_REGISTERS.findall(ptx)) == found
    # Sums of x (for offsets and float zero points) do go through shared memory, and so does an x whose rows can't be
    # loaded asynchronously.
    if candidate.recipe not in {"q4_1", "int4_float_zero"} and candidate.even:
        last = [match.start() for match in _WGMMA.finditer(ptx)][-1]
        assert "st.shared" not in ptx[:last]


@pytest.mark.parametrize("candidate", [item for item in CHOSEN if str(item).startswith("sm90-gradient")], ids=str)
def test_hopper_feeds_gradients_from_registers(candidate: Candidate, compiling: Compiling) -> None:
    """On sm_90 each wgmma of an input gradient takes its weights from registers, all of their terms."""
    ptx = compiling[candidate].ptx
    found = len(_WGMMA.findall(ptx))
    assert len(_FROM_REGISTERS.findall(ptx)) == found
    assert bool(found) is (candidate.dtype is not torch.float32)


def test_a_table_is_read_once() -> None:
    """The lanes' entries of a table are made once per thread, and each code costs one shuffle."""
    candidate = Candidate(90, "gemv", "nf4", torch.bfloat16)
    program = candidate.program()
    ptx = program.compile().ptx
    assert ptx.count("%laneid") == 1
    codes_per_thread = 32 * program.constants["R"]
    assert ptx.count("shfl.sync.idx") == codes_per_thread
