"""torch's own products: dense float32 and bfloat16, and int4 with bfloat16 activations."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from benchmarks.candidate import PEER, Calls, Candidate
from benchmarks.int4pack import int4pack_operands

if TYPE_CHECKING:
    from benchmarks.problem import Problem

__all__ = ["candidates"]

_GROUP = 32
_LIMITS = {torch.float32: 1e-11, torch.bfloat16: 1e-4}
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def candidates(problem: Problem) -> list[Candidate]:
    """Return ``F.linear`` in both dtypes and ``_weight_int4pack_mm_for_cpu``."""
    return [_linear(problem, torch.float32), _linear(problem, torch.bfloat16), _int4pack(problem)]


def _linear(problem: Problem, dtype: torch.dtype) -> Candidate:
    pattern = problem.pattern.to(dtype)
    size = problem.out_features * problem.in_features * dtype.itemsize
    weights = [problem.tiled(pattern) for _ in range(problem.copies(size))]

    def make(x: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        del threads, resident  # larger than the cache
        given = x.to(dtype)
        turns = [functools.partial(torch.nn.functional.linear, given, weight) for weight in weights]
        return Calls(turns, turns[0])

    return Candidate(
        name=f"torch {_PRECISIONS[dtype]}",
        library="torch",
        role=PEER,
        format=_PRECISIONS[dtype],
        precision=_PRECISIONS[dtype],
        weight_bytes=size,
        make=make,
        reference=pattern.double(),
        limit=_LIMITS[dtype],
    )


def _int4pack(problem: Problem) -> Candidate:
    blocks = problem.in_features // _GROUP
    grouped = problem.pattern.view(-1, blocks, _GROUP)
    scale = (grouped.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    codes = (grouped / scale).round().clamp(-8, 7)
    reference = (codes.double() * scale.double()).view(problem.pattern.shape)
    whole = problem.tiled((codes + 8).view(problem.pattern.shape).to(torch.int32))
    wide = problem.tiled(scale[..., 0])
    packed, scales = int4pack_operands(whole, wide, torch.zeros_like(wide), torch.bfloat16)
    size = packed.numel() * packed.element_size() + scales.numel() * 2
    weights = [(packed.clone(), scales.clone()) for _ in range(problem.copies(size))]
    product = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001  # its only name

    def make(x: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        del threads
        given = x.bfloat16()
        used = weights[:1] if resident else weights
        turns = [functools.partial(product, given, codes, _GROUP, numbers) for codes, numbers in used]
        return Calls(turns, turns[0])

    return Candidate(
        name="torch int4pack bf16",
        library="torch",
        role=PEER,
        format="int4",
        precision="bf16",
        weight_bytes=size,
        make=make,
        reference=reference,
    )
