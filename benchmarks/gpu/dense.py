"""cuBLAS products with a dense bfloat16 weight, with which every 4-bit path is compared."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from benchmarks.candidate import PEER, Calls, Candidate

if TYPE_CHECKING:
    from benchmarks.gpu.place import Place
    from benchmarks.problem import Problem

__all__ = ["NAME", "candidate"]

NAME = "bf16 F.linear"
_LIMIT = 1e-5


def candidate(problem: Problem, place: Place) -> Candidate:
    """Return ``F.linear`` over a bfloat16 weight, in enough copies that it comes from memory."""
    pattern = problem.pattern.to(place.device, torch.bfloat16)
    size = problem.out_features * problem.in_features * pattern.element_size()
    weights = [problem.tiled(pattern) for _ in range(problem.copies(size, place.rotation_bytes))]

    def make(x: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        del threads
        given = x.to(torch.bfloat16)
        used = weights[:1] if resident else weights
        out = torch.empty(x.shape[0], problem.out_features, dtype=torch.bfloat16, device=x.device)
        return Calls([functools.partial(torch.mm, given, weight.T, out=out) for weight in used], lambda: out)

    return Candidate(
        name=NAME,
        library="torch",
        role=PEER,
        format="bf16",
        precision="bf16",
        weight_bytes=size,
        make=make,
        reference=pattern.double(),
        limit=_LIMIT,
    )
