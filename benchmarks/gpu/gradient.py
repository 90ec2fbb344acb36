"""``gradient``: the backends' input gradients compared with cuBLAS, which multiplies by a dense bfloat16 weight."""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record
from benchmarks.candidate import OURS, PEER, Calls, Candidate, WrongAnswerError
from benchmarks.gpu import dense, ours
from benchmarks.gpu.timing import Budget, Timed, sample_us
from benchmarks.problem import Problem

if TYPE_CHECKING:
    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place
    from benchmarks.gpu.products import Table

__all__ = ["measure"]

_LIMIT = 1e-5
"""Both round the gradient to x to bfloat16 once, as in ``ours``."""


def measure(tables: tuple[Table, ...], place: Place, budget: Budget, deadline: Deadline) -> dict[str, Any]:
    """Measure tables while there is time.

    Returns:
        ``tables``: one result for each shape and M; ``refused``: why a backend computes no input gradient of a format
        here; ``left_out``: what there was no time for.

    Raises:
        WrongAnswerError: A gradient has other numbers than it should.
    """
    found: dict[str, Any] = {"tables": [], "refused": {}, "left_out": []}
    for table in tables:
        label = f"{table.shape[0]}x{table.shape[1]}"
        if deadline.is_over():
            found["left_out"].append(label)
            continue
        started = time.perf_counter()
        problem = Problem(*table.shape)
        candidates = [_dense(problem, place), *_ours(table, problem, place, found["refused"])]
        for rows in table.rows:
            if deadline.is_over():
                found["left_out"].append(f"{label}, M={rows}")
                continue
            found["tables"].append(_measure(problem, rows, candidates, place, budget))
        print(f"gradient {label}: {time.perf_counter() - started:.0f} s", flush=True)
    return found


def _dense(problem: Problem, place: Place) -> Candidate:
    pattern = problem.pattern.to(place.device, torch.bfloat16)
    size = problem.out_features * problem.in_features * pattern.element_size()
    weights = [problem.tiled(pattern) for _ in range(problem.copies(size, place.rotation_bytes))]

    def make(grad: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        del threads
        out = torch.empty(grad.shape[0], problem.in_features, dtype=torch.bfloat16, device=grad.device)
        used = weights[:1] if resident else weights
        return Calls([functools.partial(torch.mm, grad, weight, out=out) for weight in used], lambda: out)

    return Candidate(dense.NAME, "torch", PEER, "bf16", "bf16", size, make, reference=pattern.double())


def _ours(table: Table, problem: Problem, place: Place, refused: dict[str, str]) -> list[Candidate]:
    candidates = []
    for backend, instance in ours.backends().items():
        for name in ours.formats_of(instance):
            if table.formats is not None and name not in table.formats:
                continue
            try:
                made = ours.make(backend, name, problem, place, gradients=True)
            except q4.Q4Error as error:
                refused[f"{backend}, {name}"] = str(error)
                continue
            if not made.gradients:
                why = "; ".join(map(str, made.layers[0].diagnostics().gradients_refused))
                refused[f"{backend}, {name}"] = why or "the op 'input_gradient' is not declared"
                continue
            candidates.append(_candidate(made))
    return candidates


def _candidate(made: ours.Made) -> Candidate:
    def make(grad: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        del threads
        out = torch.empty(grad.shape[0], made.layers[0].in_features, dtype=ours.DTYPE, device=grad.device)
        used = range(1 if resident else len(made.layers))
        return Calls([made.gradient(copy, grad, out) for copy in used], lambda: out)

    return Candidate(
        made.name, "q4core", OURS, made.format, made.precision, made.weight_bytes, make, reference=made.reference
    )


def _measure(problem: Problem, rows: int, candidates: list[Candidate], place: Place, budget: Budget) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    grad = torch.randn(rows, problem.out_features, generator=generator).to(place.device, ours.DTYPE)
    timed, errors = [], {}
    for one in candidates:
        calls = one.make(grad, 1, False)  # noqa: FBT003  # the contract of make
        errors[one.name] = _nmse(one, calls, grad)
        timed.append(Timed(one, calls, place))
    sample_us(timed, budget, seed=rows)
    return {
        "name": f"gradient {problem.out_features}x{problem.in_features}, M={rows}",
        "shape": (problem.out_features, problem.in_features),
        "rows": rows,
        "calls": {one.candidate.name: _result(problem, rows, one, errors[one.candidate.name]) for one in timed},
        "does_not_run": {},
    }


def _nmse(candidate: Candidate, calls: Calls, grad: torch.Tensor) -> float:
    """Run once and return the error of the gradient to x, relative to its power.

    Raises:
        WrongAnswerError: It is above the limit, or not a number.
    """
    calls.turns[0]()
    if calls.answer is None or candidate.reference is None:
        return math.nan
    answer, pattern = calls.answer().double(), candidate.reference
    # The rows of the weight repeat the pattern, so the gradients that meet equal rows are added first.
    expected = grad.double().view(grad.shape[0], -1, pattern.shape[0]).sum(1) @ pattern
    error = float((answer - expected).square().sum() / expected.square().sum())
    if not error <= _LIMIT:
        message = f"{candidate.name}, {grad.shape[0]} rows: NMSE must be at most {_LIMIT:g}, got {error:g}"
        raise WrongAnswerError(message)
    return error


def _result(problem: Problem, rows: int, timed: Timed, error: float) -> dict[str, Any]:
    candidate, values = timed.candidate, record.summary(timed.us)
    elements = problem.out_features * problem.in_features
    return {
        "library": candidate.library,
        "role": candidate.role,
        "format": candidate.format,
        "precision": candidate.precision,
        "weight_bytes": candidate.weight_bytes,
        "nmse": error,
        "calls_per_sample": timed.calls_per_sample,
        "why_eager": timed.recorded.why_eager,
        "gb_per_s": candidate.weight_bytes / values["median"] / 1e3,
        "tflop_per_s": 2 * rows * elements / values["median"] / 1e6,
        **values,
    }
