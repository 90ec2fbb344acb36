"""The check of a path's kind: one that says KERNEL holds no dense weight, in no call and at no time.

Dense means a byte or more of an element's own: float32, bfloat16, and int8 levels of 4-bit codes too, because what a
kernel of one row costs is the bytes that it reads. Which paths are called, and how, is said here; ``dense_check``
judges.
"""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.checks.policy import require_kernels
from q4_conformance.checks.values import draw, judge_call
from q4_conformance.contract.case import check, expect
from q4_conformance.measurement.dense_check import Bench, Benches, Point, weigh
from q4_conformance.oracle.grids import draw_on_grid
from q4_conformance.outcome import NotDeclaredError
from q4core import ActivationPrecision, BackendUnavailableError, ComputePath, PathKind, PolicyConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4core import PackedWeight, Precision, Segment, Selection

_MANY_ROWS = (64, 128, 257)
"""Numbers of rows at which paths often work like those of dense weights; the last is past the largest usual tile."""
_SAMPLE = 16
"""One row of the large weight in so many is judged by its numbers, which other cases do of all rows of small ones."""
_DTYPES = (torch.bfloat16, torch.float16)


def _points(segment: Segment, many: tuple[int, ...]) -> list[Point]:
    """Return the least number of rows of a range, and as many more as the range has of those asked for.

    The least is called often.
    """
    low, high = segment.low, segment.high
    if segment.path.interpreted:  # takes seconds a call and says nothing about a device: it is watched once
        return [Point(segment.path, low)]
    rows = sorted({low, *(max(low, item if high is None else min(item, high)) for item in many)})
    return [Point(segment.path, item, is_often=item == low) for item in rows]


def _selections(case: Case, subject: BackendSubject, weight: PackedWeight) -> Iterator[tuple[Case, Selection]]:
    """Yield what kernels serve in each declared dtype and activation precision, with the case as it is there.

    Where kernels alone do not serve, other cases judge what that means.
    """
    declared = subject.backend.capabilities.dtypes
    dtypes = (case.dtype, *(item for item in _DTYPES if item in declared and item != case.dtype))
    for dtype, precision in itertools.product(dtypes, ActivationPrecision):
        request = subject.request(weight, dtype=dtype, precision=precision)
        try:
            subject.require_declared(request)
            selection = subject.choose(request, ComputePath.KERNEL_ONLY)
        except (NotDeclaredError, BackendUnavailableError, PolicyConflictError):
            continue
        yield attrs.evolve(case, dtype=dtype, precision=precision), selection


@check("kind")
def _check_kind(case: Case, subject: BackendSubject) -> str:
    """A path that says KERNEL holds no dense weight: none is stored, and none is there at any time in a call.

    Each path is watched in the first dtype and activation precision in which it serves.
    """
    weight = case.weight()
    require_kernels(subject, case, weight)
    gc.collect()
    seen: list[str] = []
    known: set[tuple[str, Precision]] = set()
    for here, selection in _selections(case, subject, weight):
        is_own = here.dtype == case.dtype
        segments = [item for item in selection.segments if (item.path.name, item.path.precision) not in known]
        segments = [item for item in segments if is_own or not item.path.interpreted]
        known |= {(item.path.name, item.path.precision) for item in segments}
        if segments:
            many = _MANY_ROWS if is_own else _MANY_ROWS[:1]
            points = [point for segment in segments for point in _points(segment, many)]
            seen += _watch(here, subject, points, weight)
    layer = subject.layer(weight, dtype=case.dtype, compute_path=ComputePath.KERNEL_ONLY)
    sample = torch.arange(0, weight.out_features, _SAMPLE)
    rows = case.weight().take_rows(sample)
    for segment in layer.diagnostics().segments:
        expect(segment.path.kind is PathKind.KERNEL, f"{segment.path.name} is no kernel path")
        x = draw(case, layer, segment.low)
        judge_call(attrs.evolve(layer, weight=rows), x, layer(x)[:, sample])
    return "; ".join(seen)


def _watch(case: Case, subject: BackendSubject, points: list[Point], weight: PackedWeight) -> Iterator[str]:
    """Weigh a prepared weight, compared with smaller and larger ones of its form."""

    def bench(n: int, k: int) -> Bench:
        """Prepare a weight of this size, to be called wherever the same paths serve it."""
        source = weight if (n, k) == weight.shape else attrs.evolve(case.weight_recipe, n=n, k=k).build()
        request = subject.request(source, dtype=case.dtype, precision=case.precision)
        seen = subject.choose(request, ComputePath.KERNEL_ONLY)
        facts: Any = {"dtype": case.dtype, "seed": case.seeds[0], "weight": source}
        inputs = [
            (point, draw_on_grid(point.path.precision, point.rows, k, **facts).to(subject.device))
            for point in points
            if seen.path_for(point.rows) == point.path
        ]
        return Bench(subject.backend, source, lambda: subject.prepare(source, request, ComputePath.KERNEL_ONLY), inputs)

    n, k = weight.shape
    bench(64, max(256, 2 * weight.block_size)).grown(points)  # what libraries take once, they take here
    benches = Benches(bench(n, k), bench(n // 2, k // 2), lambda: bench(2 * n, 2 * k))
    yield from weigh(benches, points, f"{case.dtype}, activations {case.precision.value}")
