"""``gemv`` and ``gemm``: our layers compared with cuBLAS, and each path alone, which shows where they cross."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import attrs

import q4core as q4
from benchmarks import record
from benchmarks.candidate import WrongAnswerError
from benchmarks.gpu import dense, ours
from benchmarks.gpu.timing import Budget, Timed, sample_us
from benchmarks.problem import Problem

if TYPE_CHECKING:
    from typing import TypeAlias

    from benchmarks.candidate import Candidate
    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place

    _Choice: TypeAlias = "tuple[Candidate, q4.KernelPath | None]"

__all__ = ["GEMM", "GEMV", "GRADIENT", "TINY_GEMM", "TINY_GEMV", "TINY_GRADIENT", "Table", "measure"]

_FAULTS = (RuntimeError, ValueError, TypeError, q4.Q4Error)
"""What a path that is called alone may raise: recorded with the other results."""


@attrs.frozen
class Table:
    """One shape, the rows of x that it is multiplied with, and what is measured.

    Args:
        shape: N and K.
        rows: Every M.
        formats: Names of formats; None for all that the backends serve.
        has_paths: Whether each path is measured alone as well, at every M.
    """

    shape: tuple[int, int]
    rows: tuple[int, ...] = (1,)
    formats: frozenset[str] | None = None
    has_paths: bool = False


_FEW = frozenset({"nf4", "nvfp4"})
_SOME = frozenset({"nf4", "nvfp4", "mxfp4", "q4_0", "int4 g128"})
GEMV = (
    Table((8192, 8192), (1, 2, 4, 8)),
    Table((4096, 4096), (1, 2, 4, 8)),
    Table((28672, 8192)),
    Table((8192, 28672)),
    Table((14336, 4096)),
    Table((4096, 14336)),
    Table((2048, 2048)),
    Table((1024, 4096)),
)
"""From 2 to 117 MB of codes; the first one alone answers most questions, so it comes first."""
GEMM = (
    Table((8192, 8192), (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192), _FEW, has_paths=True),
    Table((4096, 4096), (16, 64, 256, 512, 1024, 2048, 4096), _SOME, has_paths=True),
    Table((14336, 4096), (512, 2048, 8192), _FEW),
)
GRADIENT = (
    Table((8192, 8192), (1, 16, 128, 512, 2048, 8192), _FEW),
    Table((4096, 4096), (1, 16, 128, 512, 2048), _SOME),
    Table((14336, 4096), (512, 2048), _FEW),
)
TINY_GRADIENT = (Table((64, 128), (1, 17), _FEW),)
TINY_GEMV = (Table((64, 128), (1, 2), frozenset({"nf4", "nvfp4", "int4 g128"})),)
TINY_GEMM = (Table((64, 128), (17,), frozenset({"nf4", "nvfp4"}), has_paths=True),)


def measure(tables: tuple[Table, ...], place: Place, budget: Budget, deadline: Deadline) -> dict[str, Any]:
    """Measure tables while there is time.

    Returns:
        ``tables``: one result for each shape and M; ``refused``: why a backend does not serve a format here;
        ``left_out``: what there was no time for; ``error``: a layer computes other numbers than it should, so that
        nothing was measured after it.
    """
    found: dict[str, Any] = {"tables": [], "refused": {}, "left_out": []}
    for table in tables:
        label = f"{table.shape[0]}x{table.shape[1]}"
        if deadline.is_over():
            found["left_out"].append(label)
            continue
        started = time.perf_counter()
        problem = Problem(*table.shape)
        candidates: list[_Choice] = [(dense.candidate(problem, place), None)]
        candidates += _ours(table, problem, place, found["refused"], deadline)
        for rows in table.rows:
            if deadline.is_over():
                found["left_out"].append(f"{label}, M={rows}")
                continue
            chosen = [(one, path) for one, path in candidates if path is None or _may_run(path, rows)]
            try:
                found["tables"].append(_measure(problem, rows, chosen, place, budget))
            except WrongAnswerError as error:
                return {**found, "error": f"WrongAnswerError: {error}"}
        print(f"{label}: {time.perf_counter() - started:.0f} s", flush=True)
    return found


def _may_run(path: q4.KernelPath, rows: int) -> bool:
    """Return whether a path is measured alone with some rows: where it is offered; a dense one anywhere.

    Below its rows a dense path shows where it begins to win. A kernel beyond its own may read where it must not.
    """
    return path.covers(rows) or path.kind is q4.PathKind.DEQUANT


def _ours(table: Table, problem: Problem, place: Place, refused: dict[str, str], deadline: Deadline) -> list[_Choice]:
    candidates: list[_Choice] = []
    for backend, instance in ours.backends().items():
        for name in ours.formats_of(instance):
            if table.formats is not None and name not in table.formats:
                continue
            for precision in ours.precisions_of(instance):
                if deadline.is_over():
                    refused.setdefault(f"{backend}, {name} {precision}", "no time was left")
                    continue
                try:
                    made = ours.make(backend, name, problem, place, precision)
                except q4.Q4Error as error:
                    refused[f"{backend}, {name} {precision}"] = str(error)
                    continue
                candidates.append((ours.candidate(made), None))
                if table.has_paths:
                    candidates += [(ours.path_candidate(made, path.name), path) for path in made.paths()]
    return candidates


def _measure(problem: Problem, rows: int, candidates: list[_Choice], place: Place, budget: Budget) -> dict[str, Any]:
    x = problem.x(rows).to(place.device).bfloat16().float()  # what 16 bits hold, so that errors are the product's own
    timed, errors, beyond = [], {}, {}
    for one, path in candidates:
        try:
            calls = one.make(x, 1, False)  # noqa: FBT003  # the contract of make
            errors[one.name] = one.nmse(calls, x)
            timed.append(Timed(one, calls, place))
        except WrongAnswerError as error:
            if path is None:
                raise
            beyond[one.name] = str(error)
        except _FAULTS as error:
            if path is None:
                raise
            beyond[one.name] = f"{type(error).__name__}: {error}"
    sample_us(timed, budget, seed=rows)
    return {
        "name": f"{'gemv' if rows <= 8 else 'gemm'} {problem.out_features}x{problem.in_features}, M={rows}",  # noqa: PLR2004  # as the kernels are called
        "shape": (problem.out_features, problem.in_features),
        "rows": rows,
        "calls": {one.candidate.name: _result(problem, rows, one, errors[one.candidate.name]) for one in timed},
        "does_not_run": beyond,
    }


def _result(problem: Problem, rows: int, timed: Timed, error: float | None) -> dict[str, Any]:
    candidate = timed.candidate
    values = record.summary(timed.us)
    elements = problem.out_features * problem.in_features
    return {
        "library": candidate.library,
        "role": candidate.role,
        "format": candidate.format,
        "precision": candidate.precision,
        "weight_bytes": candidate.weight_bytes,
        "bits_per_weight": candidate.weight_bytes * 8 / elements,
        "nmse": error,
        "calls_per_sample": timed.calls_per_sample,
        "why_eager": timed.recorded.why_eager,
        "gb_per_s": candidate.weight_bytes / values["median"] / 1e3,
        "tflop_per_s": 2 * rows * elements / values["median"] / 1e6,
        **values,
    }
