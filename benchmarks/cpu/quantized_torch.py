"""bitsandbytes' and torchao's 4-bit layers on CPU."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import TYPE_CHECKING

import torch

from benchmarks.candidate import PEER, Calls, Candidate

if TYPE_CHECKING:
    from benchmarks.problem import Problem

__all__ = ["bitsandbytes_candidates", "torchao_candidates"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FEW_ROWS = 1


def bitsandbytes_candidates(problem: Problem) -> list[Candidate]:
    """NF4 in blocks of 64, as ``Linear4bit`` runs it: from a repacked weight where the CPU has AVX512-BF16."""
    return [_bitsandbytes(problem, precision) for precision in _DTYPES]


def _bitsandbytes(problem: Problem, precision: str) -> Candidate:
    library = importlib.import_module("bitsandbytes")
    dtype = _DTYPES[precision]
    dense = problem.tiled(problem.pattern)
    size = problem.out_features * problem.in_features // 2 + problem.out_features * problem.in_features // 64 * 4
    shape = (problem.in_features, problem.out_features)
    first = library.nn.Linear4bit(*shape, bias=False, compute_dtype=dtype, compress_statistics=False, quant_type="nf4")
    first.weight = library.nn.Params4bit(dense, requires_grad=False, compress_statistics=False, quant_type="nf4")
    first = first.to("cpu").eval()
    layers = [first, *(copy.deepcopy(first) for _ in range(problem.copies(size) - 1))]
    packed, state = library.functional.quantize_4bit(problem.pattern, blocksize=64, quant_type="nf4")
    reference = library.functional.dequantize_4bit(packed, state).double()

    def make(x: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        del threads, resident
        turns = [functools.partial(layer, x.to(dtype)) for layer in layers]
        return Calls(turns, turns[0])

    return Candidate(
        name=f"bitsandbytes NF4 {precision}",
        library="bitsandbytes",
        role=PEER,
        format="nf4",
        precision=precision,
        weight_bytes=size,
        make=make,
        reference=reference,
    )


def torchao_candidates(problem: Problem) -> list[Candidate]:
    """Return weight-only NVFP4; one row alone, because a call takes half a second."""
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    dense = problem.tiled(problem.pattern).bfloat16()
    whole = functools.partial(module.NVFP4Tensor.to_nvfp4, per_tensor_scale=dense.abs().amax().float() / (448 * 6))
    size = problem.out_features * problem.in_features * 9 // 16
    weights = [whole(dense) for _ in range(2)]
    reference = weights[0].dequantize(torch.float32)[: problem.pattern.shape[0]].double()

    def make(x: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        del threads, resident
        turns = [functools.partial(torch.nn.functional.linear, x.bfloat16(), weight) for weight in weights]
        return Calls(turns, turns[0])

    return [
        Candidate(
            name="torchao NVFP4 bf16",
            library="torchao",
            role=PEER,
            format="nvfp4",
            precision="bf16",
            weight_bytes=size,
            make=make,
            reference=reference,
            most_rows=_FEW_ROWS,
        )
    ]
