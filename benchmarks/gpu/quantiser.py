"""The native quantiser: bytes read and written per second, and a comparison of its bytes with the reference's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from benchmarks import record
from benchmarks.candidate import OURS, Calls, Candidate, WrongAnswerError
from benchmarks.gpu import ours
from benchmarks.gpu.timing import Budget, Timed, sample_us
from benchmarks.problem import Problem
from benchmarks.weights import weight_of

if TYPE_CHECKING:
    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place

__all__ = ["SHAPES", "TINY_SHAPES", "measure"]

SHAPES = ((8192, 8192), (4096, 4096), (28672, 8192))
TINY_SHAPES = ((128, 256),)
_DTYPES = (torch.bfloat16, torch.float32)


def measure(shapes: tuple[tuple[int, int], ...], place: Place, budget: Budget, deadline: Deadline) -> dict[str, Any]:
    """Measure each backend's quantiser on dense weights of each shape and dtype, while there is time.

    Raises:
        WrongAnswerError: A quantiser gives other bytes than the reference.
    """
    found: dict[str, Any] = {"calls": {}, "refused": {}, "left_out": []}
    for backend in ours.backends().values():
        if "quantize" not in backend.capabilities.ops:
            found["refused"][backend.name] = "the op 'quantize' is not declared"
            continue
        for name in ours.formats_of(backend):
            for shape in shapes:
                for dtype in _DTYPES:
                    label = f"{name}, {shape[0]}x{shape[1]}, {str(dtype).removeprefix('torch.')}"
                    if deadline.is_over():
                        found["left_out"].append(label)
                        continue
                    _measure(backend, name, Problem(*shape), dtype, place, budget, label, found)
    return found


def _measure(  # noqa: PLR0913  # the facts of one measurement
    backend: q4.Backend,
    name: str,
    problem: Problem,
    dtype: torch.dtype,
    place: Place,
    budget: Budget,
    label: str,
    found: dict[str, Any],
) -> None:
    pattern = problem.pattern.to(dtype)
    wanted = weight_of(name, pattern)
    request = attrs.evolve(
        q4.Request.for_weight(wanted, device=place.device, dtype=dtype),
        op="quantize",
        out_features=problem.out_features,
        in_features=problem.in_features,
    )
    refusals = backend.capabilities.refusals(request) or backend.check(request).reasons
    if refusals:
        found["refused"][label] = "; ".join(map(str, refusals))
        return
    quantize: Any = backend.quantize  # type: ignore[attr-defined]  # declared by op "quantize"
    dense = problem.tiled(pattern.to(place.device))
    got: q4.PackedWeight = quantize(dense, request)
    _require_same(got, wanted, label)
    moved = dense.numel() * dense.element_size() + got.nbytes
    copies = [dense, *(dense.clone() for _ in range(problem.copies(moved, place.rotation_bytes) - 1))]
    calls = Calls([functools.partial(quantize, copy, request) for copy in copies])
    candidate = Candidate(label, "q4core", OURS, name, "none", moved, lambda *_: calls)
    timed = Timed(candidate, calls, place)
    sample_us([timed], budget)
    values = record.summary(timed.us)
    found["calls"][label] = {
        "backend": backend.name,
        "format": name,
        "shape": (problem.out_features, problem.in_features),
        "dtype": str(dtype),
        "moved_bytes": moved,
        "gb_per_s": moved / values["median"] / 1e3,
        "why_eager": timed.recorded.why_eager,
        **values,
    }


def _require_same(got: q4.PackedWeight, wanted: q4.PackedWeight, label: str) -> None:
    """Compare with the reference's pattern, which every ``P`` rows repeat, byte by byte."""
    repeats = got.out_features // wanted.out_features
    expected = dict(q4.cat([wanted] * repeats).tensors())
    given = dict(got.tensors())
    if given.keys() != expected.keys():
        raise WrongAnswerError(f"{label}: the fields must be {sorted(expected)}, got {sorted(given)}")
    for field, tensor in expected.items():
        own = given[field].cpu()
        if own.dtype != tensor.dtype or own.shape != tensor.shape or not _same_bytes(own, tensor):
            raise WrongAnswerError(f"{label}: {field} must have the reference's bytes, and has others")


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8)
    )
