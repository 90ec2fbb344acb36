"""Our layers: every format of the cpu-native backend, with exact, int16 and int8 activations."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

import q4core as q4
from benchmarks.candidate import OURS, Calls, Candidate
from benchmarks.weights import FORMATS, TYPES, exact_value, type_of, weight_of

if TYPE_CHECKING:
    from benchmarks.problem import Problem

__all__ = ["LIBRARY", "candidates", "isa", "session"]

LIBRARY = "q4core"
_LIMITS = {"exact": 1e-11, "int16": 1e-8, "int8": 1e-4}


def session(precision: str) -> q4.Session:
    """Return a session that takes nothing but cpu-native."""
    config = q4.SessionConfig(
        device="cpu", backend="cpu-native", activation_precision=precision, compute_dtype=torch.float32
    )
    return q4.Session(config, registry=_registry())


@functools.cache
def _registry() -> q4.Registry:
    """Return one registry for the process, which remembers what has been proven."""
    return q4.Registry(environment={})


def isa() -> str:
    """Return the instruction set that runs, as its path's name has it."""
    layer = session("int8").linear(q4.quantize(torch.zeros(16, 64), "q4_0"))
    return layer.diagnostics().path_name.split("_", 1)[1]


def candidates(problem: Problem, group: str | None = None) -> list[Candidate]:
    """Return one candidate for each format and precision; of a group, for each of its types."""
    found = []
    for name in FORMATS if group is None else TYPES[group]:
        pattern = (weight_of if group is None else type_of)(name, problem.pattern)
        weight = q4.cat([pattern] * problem.repeats)
        reference = exact_value(pattern)
        found += [_candidate(name, precision, weight, reference, problem) for precision in _LIMITS]
    return found


def _candidate(
    name: str, precision: str, weight: q4.PackedWeight, reference: torch.Tensor, problem: Problem
) -> Candidate:
    made = session(precision)
    first = made.linear(weight)
    size = first.diagnostics().prepared_bytes
    layers = [first, *(made.linear(weight) for _ in range(problem.copies(size) - 1))]

    def make(x: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        del threads  # torch's own number, which the sampler sets
        out = torch.empty(x.shape[0], problem.out_features)
        used = layers[:1] if resident else layers
        return Calls([functools.partial(layer.forward, x, out=out) for layer in used], lambda: out)

    return Candidate(
        name=f"{name} {precision}",
        library=LIBRARY,
        role=OURS,
        format=name,
        precision=precision,
        weight_bytes=size,
        make=make,
        reference=reference,
        limit=_LIMITS[precision],
    )
