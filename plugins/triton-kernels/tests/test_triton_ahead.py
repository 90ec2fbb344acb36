"""Ahead of time, without a device: which instructions the kernels become, and that they fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from triton_programs import RECIPES, Candidate, candidates

if TYPE_CHECKING:
    from q4_triton_kernels import Compiled

ARCHITECTURES = (80, 90, 100, 120)
GB10 = 121
ALIKE = (86, 89, 103, GB10)
"""Their code differs from that of another one in little: of all but GB10's, split sums and uneven K are left out."""
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


def _check(candidate: Candidate, *, may_spill: bool = False) -> Compiled:
    """Assert what must hold for every program: it does something, and nothing lies in local memory."""
    program = candidate.program()
    compiled = program.compile()
    assert "trap;" not in compiled.ptx
    assert re.search(r"\.local|ld\.local|st\.local", compiled.ptx) is None
    if not may_spill:
        usage = compiled.usage()
        assert (usage.stack_bytes, usage.spill_bytes) == (0, 0), usage
    assert compiled.shared_bytes <= SHARED_BYTES[candidate.arch]
    if candidate.kind == "gemv" and candidate.even:
        vectors = re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", compiled.ptx)
        of_x = program.constants["ROWS"] * (8 if program.signature["x_ptr"] == "*fp32" else 4)
        assert len(vectors) >= program.constants["R"] + of_x, "codes must be loaded 16 bytes at a time, as x is"
    if candidate.kind in {"gemm", "gradient"}:
        if candidate.dtype is torch.float32:
            assert "tf32" not in compiled.ptx
        else:
            assert TENSOR_INSTRUCTIONS[candidate.arch // 10] in compiled.ptx
    return compiled


MAIN = [item for arch in ARCHITECTURES for item in candidates(arch)]
LIKE = [item for arch in ALIKE for item in candidates(arch) if arch == GB10 or (item.even and item.final)]
OTHERS = [item for arch in (*ARCHITECTURES, *ALIKE) for item in candidates(arch, every=True)]


def test_each_format_is_compiled_for_each_architecture_in_every_run() -> None:
    """Whatever is left to the long run, no format and no architecture is left out of gemv or gemm."""
    compiled = {(item.arch, item.kind, item.recipe) for item in (*MAIN, *LIKE)}
    for arch in (*ARCHITECTURES, *ALIKE):
        for recipe in RECIPES:
            assert {(arch, "gemv", recipe), (arch, "gemm", recipe)} <= compiled


@pytest.mark.parametrize("candidate", [*MAIN, *LIKE], ids=str)
def test_compiles(candidate: Candidate) -> None:
    """Each kernel compiles in each configuration, without spills, with wide loads and tensor instructions."""
    _check(candidate)


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("candidate", OTHERS, ids=str)
def test_compiles_too(candidate: Candidate) -> None:
    """The same for every other format, dtype and specialisation.

    Products in float32 run without tensor cores; for a few formats ptxas spills some bytes there, with registers left.
    """
    _check(candidate, may_spill=candidate.kind == "gemm" and candidate.dtype is torch.float32)


HOPPER = [item for item in MAIN if item.arch == 90 and item.kind == "gemm" and "32" not in str(item.dtype)]


@pytest.mark.parametrize("candidate", HOPPER, ids=str)
def test_hopper_feeds_weights_from_registers(candidate: Candidate) -> None:
    """On sm_90 each wgmma takes its weights from registers, and nothing was stored to shared memory before the last."""
    ptx = candidate.program().compile().ptx
    found = len(_WGMMA.findall(ptx))
    assert found
    assert len(_FROM_REGISTERS.findall(ptx)) == found
    # Sums of x (for offsets and float zero points) do go through shared memory, and so does an x whose rows can't be
    # loaded asynchronously.
    if candidate.recipe not in {"q4_1", "int4_float_zero"} and candidate.even:
        last = [match.start() for match in _WGMMA.finditer(ptx)][-1]
        assert "st.shared" not in ptx[:last]


@pytest.mark.parametrize("candidate", [item for item in MAIN if str(item).startswith("sm90-gradient")], ids=str)
def test_hopper_feeds_gradients_from_registers(candidate: Candidate) -> None:
    """On sm_90 each wgmma of an input gradient takes its weights from registers, all of their terms."""
    ptx = candidate.program().compile().ptx
    found = len(_WGMMA.findall(ptx))
    assert len(_FROM_REGISTERS.findall(ptx)) == found
    assert bool(found) is (candidate.dtype is not torch.float32)


def test_a_table_is_read_once() -> None:
    """The lanes' entries of a table are made once per thread, and each code costs one shuffle."""
    candidate = next(item for item in MAIN if str(item) == "sm90-gemv-0-nf4-bf16")
    program = candidate.program()
    ptx = program.compile().ptx
    assert ptx.count("%laneid") == 1
    codes_per_thread = 32 * program.constants["R"]
    assert ptx.count("shfl.sync.idx") == codes_per_thread
