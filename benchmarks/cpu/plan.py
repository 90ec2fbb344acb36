"""Plan of a run: stages, each one shape, number of rows and number of threads, in interleaved rounds."""

from __future__ import annotations

import fnmatch
import time
from typing import Any

import attrs
import torch

from benchmarks import record
from benchmarks.candidate import OURS, PEER, YARDSTICK, Candidate
from benchmarks.cpu import ours, peers, yardsticks
from benchmarks.cpu.sampling import Budget, Timed, sample_us
from benchmarks.problem import Problem
from benchmarks.weights import TYPES

__all__ = ["FULL", "FULL_TYPES", "QUICK", "QUICK_TYPES", "Plan", "Stage", "is_wanted", "measure", "measure_types"]

_SQUARE = (4096, 4096)
_CONTENDERS = {"torch", "onnxruntime", "ggml"}
"""The libraries whose decode from the cache is measured too."""


@attrs.frozen
class Stage:
    """One table of results: a shape, rows of x, threads, and whether the weight comes from memory or from the cache."""

    shape: tuple[int, int]
    rows: int
    threads: int
    is_resident: bool = False

    @property
    def name(self) -> str:
        """Name in results and output."""
        kind = "decode" if self.rows == 1 else "prefill"
        where = ", from the cache" if self.is_resident else ""
        return f"{kind} {self.shape[0]}x{self.shape[1]}, M={self.rows}, {self.threads} threads{where}"

    def takes(self, candidate: Candidate) -> bool:
        """Say whether a candidate is measured here."""
        if candidate.most_rows is not None and self.rows > candidate.most_rows:
            return False
        if candidate.role == YARDSTICK:
            return (candidate.format == yardsticks.READER) == (self.rows == 1)
        if self.is_resident:
            return candidate.role == OURS or (
                candidate.library in _CONTENDERS and candidate.format not in {"fp32", "bf16"}
            )
        return True


@attrs.frozen
class Plan:
    """The stages of a run, and how long each is sampled."""

    stages: tuple[Stage, ...]
    decode: Budget
    prefill: Budget


def _full() -> Plan:
    cores = max(2, torch.get_num_threads())
    stages = []
    for shape in (_SQUARE, (14336, 4096), (4096, 14336)):
        stages += [Stage(shape, 1, threads) for threads in (cores, 1)]
        if shape == _SQUARE:
            stages += [Stage(shape, 1, threads, is_resident=True) for threads in (cores, 1)]
            stages += [Stage(shape, rows, cores) for rows in (4, 16, 64, 256, 512)]
            stages += [Stage(shape, rows, 1) for rows in (4, 64)]  # the targets are those of all threads
    return Plan(tuple(stages), Budget(30, 1.5, 5), Budget(30, 2.0, 5))


FULL = _full()
_CORES = max(2, torch.get_num_threads())
FULL_TYPES = Plan(
    tuple(
        Stage(shape, rows, threads)
        for shape, rows, threads in (
            *((_SQUARE, rows, _CORES) for rows in (1, 4, 16, 64, 256)),
            *((_SQUARE, rows, 1) for rows in (1, 64)),
            *(((2048, 6144), rows, _CORES) for rows in (1, 16, 64)),
        )
    ),
    Budget(20, 0.4, 5),
    Budget(15, 0.4, 5),
)
"""The stages of each group of types that checkpoints hold."""
QUICK_TYPES = Plan(tuple(Stage(_SQUARE, rows, _CORES) for rows in (1, 16, 64)), Budget(9, 0.2, 2), Budget(5, 0.2, 2))
QUICK = Plan(
    (Stage(_SQUARE, 1, FULL.stages[0].threads), Stage(_SQUARE, 1, 1), Stage(_SQUARE, 64, FULL.stages[0].threads)),
    Budget(11, 0.2, 2),
    Budget(7, 0.2, 2),
)


def is_wanted(only: str | None, role: str, name: str) -> bool:
    """Say whether ``--only`` leaves a candidate in."""
    if only is None or role == YARDSTICK:
        return True
    if only in {OURS, f"{PEER}s"}:
        return only.startswith(role)
    return fnmatch.fnmatch(name.lower(), f"*{only.lower()}*")


def measure(plan: Plan, found: dict[str, dict[str, Any]], only: str | None = None) -> list[dict[str, Any]]:
    """Measure every stage of a plan.

    Args:
        plan: What and for how long.
        found: The peers, as ``peers.facts`` returned them; one that breaks is marked there.
        only: ``ours``, ``peers`` or a part of a candidate's name; None for all. Yardsticks are always measured.

    Returns:
        One result for each stage.

    Raises:
        WrongAnswerError: Something computes other numbers than it should.
    """
    results = []
    for shape in dict.fromkeys(stage.shape for stage in plan.stages):
        problem = Problem(*shape)
        started = time.perf_counter()
        loaded = [*yardsticks.candidates(), *yardsticks.products()]
        if only != f"{PEER}s":
            loaded += ours.candidates(problem)
        if only != OURS:
            loaded += peers.load(problem, found)
        chosen = [one for one in loaded if is_wanted(only, one.role, one.name)]
        del loaded  # the copies of what is not wanted
        print(f"{shape[0]}x{shape[1]}: loaded in {time.perf_counter() - started:.0f} s", flush=True)
        budgets = {stage: plan.decode if stage.rows == 1 else plan.prefill for stage in plan.stages}
        results += [_measure(stage, problem, chosen, budgets[stage]) for stage in plan.stages if stage.shape == shape]
        del chosen
    return results


def measure_types(plan: Plan, found: dict[str, dict[str, Any]], only: str | None = None) -> list[dict[str, Any]]:
    """Measure every stage of a plan for each group of ``TYPES``, as ``measure`` does; each result names its group."""
    results = []
    for group in TYPES:
        for shape in dict.fromkeys(stage.shape for stage in plan.stages):
            problem = Problem(*shape)
            loaded = [] if only == f"{PEER}s" else ours.candidates(problem, group)
            if only != OURS:
                loaded += peers.load(problem, found, group)
            chosen = [one for one in loaded if is_wanted(only, one.role, one.name)]
            del loaded
            for stage in plan.stages:
                if stage.shape == shape and chosen:
                    budget = plan.decode if stage.rows == 1 else plan.prefill
                    results.append({**_measure(stage, problem, chosen, budget), "group": group})
            del chosen
    return results


def _measure(stage: Stage, problem: Problem, candidates: list[Candidate], budget: Budget) -> dict[str, Any]:
    started = time.perf_counter()
    x = problem.x(stage.rows)
    before = torch.get_num_threads()
    torch.set_num_threads(stage.threads)
    timed, errors = [], {}
    with torch.no_grad():
        for candidate in candidates:
            if stage.takes(candidate):
                calls = candidate.make(x, stage.threads, stage.is_resident)
                errors[candidate.name] = candidate.nmse(calls, x)
                timed.append(Timed(candidate, calls))
    torch.set_num_threads(before)
    sample_us(timed, stage.threads, budget, seed=stage.rows)
    print(f"{stage.name}: {time.perf_counter() - started:.0f} s", flush=True)
    return {
        "name": stage.name,
        "shape": stage.shape,
        "rows": stage.rows,
        "threads": stage.threads,
        "weights_from": "cache" if stage.is_resident else "memory",
        "calls": {one.candidate.name: _result(stage, one, errors[one.candidate.name], budget) for one in timed},
    }


def _result(stage: Stage, timed: Timed, error: float | None, budget: Budget) -> dict[str, Any]:
    candidate = timed.candidate
    values = record.summary(timed.us)
    elements = stage.shape[0] * stage.shape[1]
    operations = candidate.operations or 2 * stage.rows * elements
    result: dict[str, Any] = {
        "library": candidate.library,
        "role": candidate.role,
        "format": candidate.format,
        "precision": candidate.precision,
        "weight_bytes": candidate.weight_bytes,
        "nmse": error,
        "has_fewer_samples": timed.samples < budget.samples,
        "calls_per_sample": timed.repeats * timed.calls.products,
        "gb_per_s": candidate.weight_bytes / values["median"] / 1e3,
        "gflop_per_s": operations / values["median"] / 1e3,
    }
    if candidate.role != YARDSTICK:
        result["bits_per_weight"] = candidate.weight_bytes * 8 / elements
    return result | values
