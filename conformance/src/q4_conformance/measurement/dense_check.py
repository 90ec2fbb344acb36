"""Memory of a kernel path, weighed: in a call, from one call to the next, and since ``prepare``.

What a path may hold besides a dense weight grows with M (N + K), so that for many rows it is more than a dense weight.
There a weight of half the sides distinguishes the two: what grows with x and y is half there, a dense weight a quarter.
All limits are shares of N × K, derived in docs/tolerances.md.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import attrs
import torch

from q4_conformance.contract.case import expect
from q4_conformance.measurement.allocations import Allocations, own_mappings, taken_bytes, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from q4core import Backend, KernelPath, PackedWeight, Prepared

DENSE_ELEMENTS = 1 / 2
"""The share of a weight's elements of torch's tensors, of any dtype, that may be alive at once in one call."""
DENSE_BYTES = 1 / 2
"""Bytes for each element of a weight by which one call may raise memory."""
PREPARED_BYTES = 3 / 8
"""Bytes for each element of a weight by which the prepared tensors may be larger than the packed ones."""
OTHER_BYTES = 1 / 2
"""Bytes for each element of a weight that may stay besides the prepared tensors, from ``prepare`` or from calls."""
OVER_HALF_SIDES = 1 / 4
"""What may be more than twice as much as with a weight of half the sides, for each element: elements, or bytes."""
ACTIVATION_ELEMENTS = 4
"""Elements of torch's tensors that may be alive at once for each element of x and y."""
ACTIVATION_BYTES = 8
"""Bytes by which one call may raise memory for each element of x and y."""
LEAST_BYTES = 1 << 20
"""No limit is lower: libraries and interpreter take as much at times. Only weights of less than 4 MiB come to it."""
_REMEDY = (
    ". A path of kind KERNEL holds no dense weight: decode a few rows at a time and let each part go before the next, "
    "or offer the path as PathKind.DEQUANT."
)
CALLS = 16
"""Calls of one path with one number of rows, over which growth is looked for."""


@attrs.frozen
class Point:
    """A path, and with how many rows to call it; ``is_often`` where many calls are to be looked at."""

    path: KernelPath
    rows: int
    is_often: bool = False

    def __str__(self) -> str:
        """Return what a message calls it."""
        return f"{self.path.name}, M = {self.rows}"


class Bench:
    """A prepared weight, and calls with x for each point; their memory does not include what the kit itself takes."""

    def __init__(
        self,
        backend: Backend,
        weight: PackedWeight,
        prepare: Callable[[], Prepared],
        inputs: Iterable[tuple[Point, torch.Tensor]],
    ) -> None:
        self.weight = weight
        self._backend = backend
        self._inputs = dict(inputs)
        self._results = {
            point: torch.full((point.rows, weight.out_features), torch.nan, dtype=x.dtype, device=x.device)
            for point, x in self._inputs.items()
        }
        self.device = next((x.device for x in self._inputs.values()), torch.device("cpu"))
        with own_mappings(), torch.no_grad():
            before = taken_bytes(self.device)
            self.prepared = prepare()
            after = taken_bytes(self.device)
        self.extra: int | None = None
        """By how much memory grew when the weight was prepared, without the prepared tensors; None if it is unknown."""
        if before is not None and after is not None:
            self.extra = after - before - _new_bytes(self.prepared, weight)

    @property
    def size(self) -> int:
        """N × K."""
        return self.weight.out_features * self.weight.in_features

    def has(self, point: Point) -> bool:
        """Say whether this path serves this weight, too."""
        return point in self._inputs

    def call(self, point: Point) -> None:
        """Call it once."""
        x, out = self._inputs[point], self._results[point]
        self._backend.linear(self.prepared, x, out, bias=None, path=point.path.name)

    def grown(self, points: Iterable[Point], calls: int = 1) -> int:
        """Return by how much memory grows over some calls of each point that it has; 0 where it is unknown."""
        with own_mappings(), torch.no_grad():
            before = taken_bytes(self.device)
            for point in filter(self.has, points):
                for _ in range(calls):
                    self.call(point)
            after = taken_bytes(self.device)
        return 0 if before is None or after is None else after - before

    def watched(self, point: Point, enough_bytes: int) -> Allocations:
        """Return what one call allocates, which must compute something; ``enough_bytes`` as of ``watch``."""
        out = self._results[point].fill_(torch.nan)
        used = watch(lambda: self.call(point), self.device, enough_bytes=enough_bytes)
        expect(bool(torch.isfinite(out).all() and out.any()), f"{point}: the call computed nothing")
        return used


@attrs.frozen(eq=False)
class Benches:
    """The weight that is judged, one of half its sides, and a function that makes one of twice its sides."""

    full: Bench
    half: Bench
    make_double: Callable[[], Bench]

    def half_for(self, point: Point) -> Bench | None:
        """Return the bench to compare a call with; None where the limit of one call alone shows a dense weight."""
        if not self.half.has(point) or _most_bytes(self.full, point) <= self.full.size:
            return None
        return self.half


def weigh(benches: Benches, points: list[Point], where: str) -> Iterator[str]:
    """Call a prepared weight at each point, yield what was seen of memory, and fail where it holds a dense weight."""
    full = benches.full
    many = [point for point in reversed(points) if benches.half_for(point) is not None]
    few = [point for point in points if point not in many]
    suspects = list(_first_calls(benches, few, many))
    most = full.weight.nbytes + _limit(full.size * PREPARED_BYTES)
    prepared = f"{full.prepared.nbytes} bytes of prepared tensors"
    expect(full.prepared.nbytes <= most, f"{prepared} for a weight of {full.weight.nbytes}, more than {most}")
    yield prepared
    yield from [_weigh_call(benches, point) for point in (*few, *many)]
    _judge(benches, suspects, where)  # last, because a path with dense weights makes libraries cache places for them
    often = [point for point in (*few, *many) if point.is_often]
    for point in often:
        grown, limit = full.grown([point], CALLS), _limit(full.size * OTHER_BYTES)
        if grown > limit:
            text = f"{point}: {grown} bytes stay besides the prepared tensors after {CALLS} calls, more than {limit}"
            _judge(benches, [_Suspect(text, [point], CALLS)], where)
        _weigh_call(benches, point)
    if often:
        yield f"the same after {CALLS} calls of {', '.join(map(str, often))}"


@attrs.frozen(eq=False)
class _Suspect:
    """Too much stays in memory; a larger weight shows whether it is a dense one.

    What the process took meanwhile for something else is no larger there; a dense weight or its place is.
    """

    text: str
    points: list[Point]
    """What was called."""
    calls: int = 1
    explained: int | None = None
    """What stays of the full weight and half of it, where that may be places for x and y."""


def _first_calls(benches: Benches, few: list[Point], many: list[Point]) -> Iterator[_Suspect]:
    """Call each point for the first time, and yield where too much stays."""
    full, half = benches.full, benches.half
    if full.extra is None:
        return
    stays, limit = full.extra + full.grown(few), _limit(full.size * OTHER_BYTES)
    if stays > limit:
        yield _Suspect(f"{stays} bytes stay besides the prepared tensors, more than {limit}", few)
    if not many:
        return
    smaller = half.grown(many)  # first, because what is cached for x and y may be cached for both weights
    larger, limit = full.grown(many), _limit(full.size * OVER_HALF_SIDES)
    if larger - smaller > limit:
        rows = ", ".join(map(str, many))
        text = f"{rows}: {larger + smaller} bytes stay besides the prepared tensors, and {smaller} with half N and K"
        yield _Suspect(f"{text}, more than {limit} over twice that", many, explained=larger + smaller)


def _judge(benches: Benches, suspects: Iterable[_Suspect], where: str) -> None:
    """Judge what stays by a weight of twice the sides."""
    for suspect in suspects:
        gc.collect()
        double = benches.make_double()
        again = double.grown(suspect.points, suspect.calls)
        if suspect.explained is None:
            again, limit = again + (double.extra or 0), _limit(double.size * OTHER_BYTES)
            expect(again <= limit, f"{where}: {suspect.text}, and {again} of a weight four times as large")
        else:
            over, limit = again - suspect.explained, _limit(double.size * OVER_HALF_SIDES)
            expect(over <= limit, f"{where}: {suspect.text}, and {again} more of a weight four times as large")


def _limit(number: float) -> int:
    return max(LEAST_BYTES, int(number))


def _activations(bench: Bench, point: Point) -> int:
    """Return the elements of x and y."""
    return point.rows * sum(bench.weight.shape)


def _most_bytes(bench: Bench, point: Point) -> int:
    """Return by how many bytes one call may raise memory."""
    return _limit(bench.size * DENSE_BYTES + ACTIVATION_BYTES * _activations(bench, point))


def _weigh_call(benches: Benches, point: Point) -> str:
    """Watch one call; for many rows, one of half N and K as well."""
    full, half = benches.full, benches.half_for(point)
    most, over = _most_bytes(full, point), _limit(full.size * OVER_HALF_SIDES)
    used = full.watched(point, most if half is None else over)
    peak = used.peak_bytes or 0
    elements = int(full.size * DENSE_ELEMENTS) + ACTIVATION_ELEMENTS * _activations(full, point)
    made = f"{point}: {used.elements} elements of torch's tensors were alive at once"
    expect(used.elements <= elements, f"{made}, more than {elements}{_REMEDY}")
    expect(peak <= most, f"{point}: memory peaked by {peak} bytes, more than {most}{_REMEDY}")
    if half is not None and (used.elements > full.size * OVER_HALF_SIDES or peak > over):
        least = half.watched(point, 0)
        text = f"{made}, and {least.elements} with half N and K"
        beyond = int(full.size * OVER_HALF_SIDES)
        over_twice = f"{text}, more than {beyond} over twice that{_REMEDY}"
        expect(used.elements - 2 * least.elements <= beyond, over_twice)
        text = f"{point}: memory peaked by {peak} bytes, and by {least.peak_bytes} with half N and K"
        expect(peak - 2 * (least.peak_bytes or 0) <= over, f"{text}, more than {over} over twice that{_REMEDY}")
    return f"{point}: {used.elements} elements alive at once, peak {used.peak_bytes} bytes"


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
