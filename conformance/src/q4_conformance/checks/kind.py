"""The check of a path's kind: one that says KERNEL holds no dense weight, in no call and at no time.

Dense means a byte or more of an element's own: float32, bfloat16, and int8 levels of 4-bit codes too, because what a
kernel of one row costs is the bytes that it reads. All limits are shares of N × K, derived in docs/tolerances.md.
"""

from __future__ import annotations

import functools
import gc
import itertools
from typing import TYPE_CHECKING

import attrs
import torch

from q4_conformance.checks.policy import serves_kernels
from q4_conformance.checks.values import draw, judge_call
from q4_conformance.heap import own_mappings
from q4_conformance.outcome import NotDeclaredError
from q4_conformance.table import check, expect
from q4_conformance.watch import taken_bytes, watch
from q4core import ActivationPrecision, BackendUnavailableError, ComputePath, PathKind, PolicyConflictError, Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_conformance.subject import BackendSubject
    from q4_conformance.table import Case
    from q4core import KernelPath, PackedWeight, Precision, Prepared, Segment, Selection

DENSE_ELEMENTS = 1 / 2
"""The share of a weight's elements that torch may make, of any dtype, in one call."""
DENSE_BYTES = 1 / 2
"""Bytes for each element of a weight by which one call may raise memory."""
KEPT_BYTES = 3 / 8
"""Bytes for each element of a weight by which the prepared tensors may be larger than the packed ones."""
BESIDE_BYTES = 1 / 2
"""Bytes for each element of a weight that may stay beside the prepared tensors, from ``prepare`` or from calls."""
ACTIVATION_ELEMENTS = 4
"""Elements that torch may make for each element of x and y."""
ACTIVATION_BYTES = 8
"""Bytes by which one call may raise memory for each element of x and y."""
LEAST_BYTES = 1 << 20
"""No limit is lower: libraries and interpreter take as much at times. Only weights of less than 4 MiB come to it."""
_MANY_ROWS = (64, 128)
"""From how many rows on paths are wont to do as those of dense weights do."""
_DTYPES = (torch.bfloat16, torch.float16)


@attrs.frozen(eq=False)
class _View:
    """What a selection says of each number of rows, where ``draw`` asks a layer."""

    device: torch.device
    paths: Callable[[int], KernelPath]
    roundings: int = 0

    def precision(self, rows: int) -> Precision:
        return self.paths(rows).precision

    def codebook(self, rows: int) -> tuple[float, ...] | None:
        return self.paths(rows).codebook

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError


@attrs.frozen(eq=False)
class _Call:
    """One call of one path, made once already."""

    path: KernelPath
    rows: int
    run: Callable[[], object]
    out: torch.Tensor


@attrs.frozen(eq=False)
class _Paths:
    """Paths of a backend, each with the numbers of rows to call it with."""

    case: Case
    subject: BackendSubject
    view: _View
    points: list[tuple[KernelPath, int]]

    def start(self, weight: PackedWeight) -> tuple[Prepared, list[_Call], int | None]:
        """Prepare a weight and call each path once; return also how much memory stays beside the prepared tensors."""
        case, device = self.case, self.subject.device
        request = self.subject.request(weight, dtype=case.dtype, precision=case.precision)
        inputs = [draw(case, self.view, weight, rows, case.seeds[0]) for _, rows in self.points]
        results = [torch.full((rows, weight.out_features), torch.nan, dtype=case.dtype) for _, rows in self.points]
        results = [out.to(device) for out in results]
        calls = []
        with own_mappings(), torch.no_grad():
            before = taken_bytes(device)
            prepared = self.subject.prepare(weight, request, ComputePath.KERNEL_ONLY)
            for (path, rows), x, out in zip(self.points, inputs, results, strict=True):
                run = functools.partial(self.subject.backend.linear, prepared, x, out, bias=None, path=path.name)
                run()
                calls.append(_Call(path, rows, run, out))
            after = taken_bytes(device)
        if before is None or after is None:
            return prepared, calls, None
        return prepared, calls, max(0, after - before - _new_bytes(prepared, weight))


def _rows(segment: Segment, many: tuple[int, ...]) -> list[int]:
    """Return the least number of rows of a range, and as many more as the range has of those asked for."""
    low, high = segment.low, segment.high
    if _is_interpreted(segment):
        many = ()
    return sorted({low, *(max(low, rows if high is None else min(rows, high)) for rows in many)})


def _is_interpreted(segment: Segment) -> bool:
    """Say whether a path is interpreted, which takes seconds a call and stands for no device: it is watched once."""
    return segment.path.standing is Standing.INTERPRETED


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
def check_kind(case: Case, subject: BackendSubject) -> str:
    """A path that says KERNEL holds no dense weight: none is kept, and none is made in a call, whole or in slices.

    Each path is watched in the first dtype and activation precision in which it serves.
    """
    weight = case.weight()
    if not serves_kernels(subject, case, weight):
        raise NotDeclaredError("no kernel path for every M is offered")
    gc.collect()
    seen: list[str] = []
    known: set[tuple[str, Precision]] = set()
    for here, selection in _selections(case, subject, weight):
        is_own = here.dtype == case.dtype
        segments = [item for item in selection.segments if (item.path.name, item.path.precision) not in known]
        segments = [item for item in segments if is_own or not _is_interpreted(item)]
        known |= {(item.path.name, item.path.precision) for item in segments}
        if segments:
            many = _MANY_ROWS if is_own else _MANY_ROWS[:1]
            points = [(segment.path, rows) for segment in segments for rows in _rows(segment, many)]
            seen += _watch(_Paths(here, subject, _View(subject.device, selection.path_for), points), weight)
    layer = subject.layer(weight, dtype=case.dtype, compute_path=ComputePath.KERNEL_ONLY)
    for segment in layer.diagnostics().segments:
        expect(segment.path.kind is PathKind.KERNEL, f"{segment.path.name} is no kernel path")
        x = draw(case, layer, weight, segment.low, case.seeds[0])
        judge_call(layer, weight, x, layer(x))
    return "; ".join(seen)


def _watch(paths: _Paths, weight: PackedWeight) -> list[str]:
    """Watch what stays of preparing a weight and of the first calls, then what later calls hold."""
    recipe = paths.case.weight_recipe
    small = attrs.evolve(recipe, n=64, k=max(256, 2 * recipe.block_size))
    paths.start(small.build())  # what libraries take once, they take here
    prepared, calls, beside = paths.start(weight)
    size, packed = weight.out_features * weight.in_features, weight.nbytes
    most = packed + _limit(size * KEPT_BYTES)
    kept = f"{prepared.nbytes} bytes of prepared tensors"
    expect(prepared.nbytes <= most, f"{kept} for a weight of {packed}, more than {most}")
    seen = [_watch_call(call, weight) for call in calls]
    if beside is not None:  # judged last, because whoever makes dense weights lets libraries keep places for them
        _judge_beside(paths, weight, beside)
        kept = f"{kept} and {beside} beside"
    return [kept, *seen]


def _judge_beside(paths: _Paths, weight: PackedWeight, beside: int) -> None:
    """Judge what stays beside the prepared tensors, by a larger weight where it is too much.

    What the process took meanwhile for something else is no larger there; a dense weight or its place is.
    """
    most = _limit(weight.out_features * weight.in_features * BESIDE_BYTES)
    if beside <= most:
        return
    gc.collect()
    recipe = paths.case.weight_recipe
    large = attrs.evolve(recipe, n=2 * recipe.n, k=2 * recipe.k).build()
    again, limit = paths.start(large)[-1] or 0, _limit(large.out_features * large.in_features * BESIDE_BYTES)
    text = f"{beside} bytes stay beside the prepared tensors, more than {most}"
    where = f"{paths.case.dtype}, activations {paths.case.precision.value}"
    expect(again <= limit, f"{where}: {text}, and {again} of a weight four times as large")


def _watch_call(call: _Call, weight: PackedWeight) -> str:
    """Watch one call."""
    outputs, inputs = weight.shape
    size, activations = outputs * inputs, call.rows * (inputs + outputs)
    what = f"{call.path.name}, M = {call.rows}"
    most = _limit(size * DENSE_BYTES + ACTIVATION_BYTES * activations)
    call.out.fill_(torch.nan)
    used = watch(call.run, call.out.device, enough_bytes=most)
    expect(bool(torch.isfinite(call.out).all() and call.out.any()), f"{what}: the call computed nothing")
    elements = int(size * DENSE_ELEMENTS) + ACTIVATION_ELEMENTS * activations
    expect(used.elements <= elements, f"{what}: {used.elements} elements were made, more than {elements}")
    if used.peak_bytes is not None:
        expect(used.peak_bytes <= most, f"{what}: memory peaked by {used.peak_bytes} bytes, more than {most}")
    return f"{what}: {used.elements} elements, peak {used.peak_bytes} bytes"


def _limit(number: float) -> int:
    return max(LEAST_BYTES, int(number))


def _new_bytes(prepared: Prepared, weight: PackedWeight) -> int:
    """Return the bytes of the prepared tensors, each byte once, whose memory is not the weight's own."""
    given = {tensor.untyped_storage().data_ptr() for _, tensor in weight.tensors()}
    sizes: dict[int, int] = {}
    for tensor in prepared.tensors:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in given:
            sizes[place] = min(storage.nbytes(), sizes.get(place, 0) + tensor.nbytes)
    return sum(sizes.values())
