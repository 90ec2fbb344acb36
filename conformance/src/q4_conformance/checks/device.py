"""Checks of quantisers and of what matters on a device: its FP4 path, who is picked, graphs, streams, and no waiting.

Rounding by chance gives the neighbour b > a of a value v with probability p = (v - a) / (b - a). The mean of n draws
then has the expectation v and the standard deviation (b - a) sqrt(p (1 - p) / n). Of N such means, the largest
deviation stays below 6 standard deviations (chance 2e-9 each), and the sum of all of them, divided by sqrt(N), below 5
(chance 6e-7). A bias of one part in forty of a step shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance.checks.policy import require_kernels
from q4_conformance.checks.values import check_noise, check_values, draw, judge_call, judged_calls
from q4_conformance.contract.case import check, expect
from q4_conformance.oracle.decoding import decode_scales, stored_bytes
from q4_conformance.oracle.exact import exact_weight
from q4_conformance.outcome import FailureError, NotDeclaredError, NotTestableError
from q4_conformance.subjects.backend import make_registry
from q4core import PackedWeight, PathKind, Request, Rounding, Session, WeightSpec
from q4core import quantize as quantize_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendLayer, BackendSubject
    from q4core import Format

_BUSY_CYCLES = 100_000_000
"""About 50 ms of one multiprocessor: long compared with any call here, short compared with a test."""
_MASTERS = (torch.float32, torch.bfloat16, torch.float16)


def _masters(kind: Format, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield dense weights that a quantiser may get wrong: zeros, ties, one large value, tiny and huge rows."""
    generator = torch.Generator().manual_seed(seed)
    columns = 4 * kind.block_size
    plain = torch.randn(33, columns, generator=generator)
    yield "normal", plain
    yield "zeros", torch.zeros(3, columns)
    halves = torch.randint(-24, 25, (17, columns), generator=generator) / 4
    halves[:, :: kind.block_size] = 6.0
    yield "ties", halves
    spread = plain * torch.exp2(torch.linspace(-20, 6, 33))[:, None]
    spread[0, 0] = 900.0
    yield "spread", spread
    yield "one row", plain[:1]


def quantiser_of(subject: BackendSubject, wanted: PackedWeight, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the backend's quantiser, as asked to make such a weight of that dtype, where it is declared and here."""
    if "quantize" not in subject.backend.capabilities.ops:
        raise NotDeclaredError("the op 'quantize' is not declared")
    plain = Request.for_weight(wanted, device=subject.device, dtype=dtype)
    request = attrs.evolve(plain, op="quantize", out_features=wanted.out_features, in_features=wanted.in_features)
    subject.require_declared(request)
    subject.require_hardware(request)
    quantize: Any = subject.backend.quantize  # type: ignore[attr-defined]  # declared by op "quantize"
    return lambda dense, **how: quantize(dense.to(subject.device), request, **how)


@check("native_quantiser")
def _check_native_quantiser(case: Case, subject: BackendSubject) -> str:
    kind = case.weight_recipe.format
    count = 0
    for dtype in _MASTERS:
        for name, dense in _masters(kind, case.seeds[0]):
            master = dense.to(dtype)
            wanted = quantize_ref(master, kind.name)
            expect_same_bytes(quantiser_of(subject, wanted, dtype)(master), wanted, f"{name}, {dtype}")
            count += 1
    return f"{count} weights"


def expect_same_bytes(got: object, wanted: PackedWeight, what: str) -> None:
    """Raise ``FailureError`` where a quantiser's result is not the reference's, byte for byte."""
    if not isinstance(got, PackedWeight):
        raise FailureError(f"{what}: {type(got).__name__} instead of a PackedWeight")
    expect(WeightSpec.of(got) == WeightSpec.of(wanted), f"{what}: layout {WeightSpec.of(got)}")
    for (field, expected), (_, given) in zip(wanted.tensors(), got.tensors(), strict=True):
        same = given.dtype == expected.dtype and given.shape == expected.shape
        expect(same, f"{what}: {field} is {given.dtype} {list(given.shape)}")
        theirs, ours = stored_bytes(expected), stored_bytes(given)
        wrong = 0 if ours == theirs else sum(one != other for one, other in zip(ours, theirs, strict=True))
        expect(not wrong, f"{what}: {wrong} bytes of {field} differ from the reference's")


@check("native_product")
def _check_native_product(case: Case, subject: BackendSubject) -> str:
    return f"{check_values(case, subject)}; {check_noise(case, subject)}"


@check("picked")
def _check_picked(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    request = subject.request(weight, dtype=case.dtype)
    subject.require_declared(request)
    subject.require_hardware(request)
    require_kernels(subject, case, weight)
    config = subject.config(backend=None, activation_precision=case.precision, compute_dtype=case.dtype)
    with Session(config, registry=make_registry(subject.backend)) as session:
        layer = session.linear(weight)
        record = layer.diagnostics()
        expect(record.backend == subject.name, f"{record.backend!r} serves; rejections {record.rejections}")
        first = record.segments[0].path
        expect(first.kind is PathKind.KERNEL, f"{first} serves the lowest M")
        expect(record.fallback_reason is None, f"fallback {record.fallback_reason!r}")
        expect(record.proven, "the paths are not proven")
        expect(record.native_load_state, "the native state is empty")
    return f"{record.backend}, {first}, {record.native_load_state}"


def _on_cuda(case: Case, subject: BackendSubject) -> BackendLayer:
    if subject.device.type != "cuda":
        raise NotTestableError("graphs, streams and waiting are a CUDA device's")
    return subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)


@check("graph")
def _check_graph(case: Case, subject: BackendSubject) -> str:
    layer = _on_cuda(case, subject)
    for rows in case.rows:
        calls = judged_calls(layer, [draw(case, layer, rows, seed) for seed in case.seeds])
        x, out = calls[0][0].clone(), torch.empty_like(calls[0][1])
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            layer(x, out=out)
        for given, wanted in calls:
            x.copy_(given)
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize(subject.device)
            expect(torch.equal(out, wanted), f"M = {rows}: a replay gives other bits than a call")
    return f"{len(case.rows)} graphs, {len(case.seeds)} replays of each"


def _segments(device: torch.device) -> int:
    """Return how often torch's allocator has asked the driver for memory."""
    return int(torch.cuda.memory_stats(device).get("segment.all.allocated", 0))


@check("quiet")
def _check_quiet(case: Case, subject: BackendSubject) -> str:
    """A call with ``out=`` returns before the device has done the work before it, and asks the driver for no memory.

    Asking is what waits for the device and breaks a capture. Memory that torch's allocator has cached may serve as a
    temporary, which is free at the end of the call.
    """
    layer = _on_cuda(case, subject)
    for rows in case.rows:
        x = draw(case, layer, rows)
        out = torch.empty(rows, layer.weight.out_features, dtype=case.dtype, device=layer.device)
        with torch.no_grad():
            layer(x, out=out)  # what is made once is made now
            torch.cuda.synchronize(subject.device)
            before = torch.cuda.memory_allocated(subject.device)
            asked = _segments(subject.device)
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                done: Any = torch.cuda.Event()
                torch.cuda._sleep(_BUSY_CYCLES)  # noqa: SLF001  # torch's own means of keeping a device busy
                layer(x, out=out)
                done.record()
                expect(not done.query(), f"M = {rows}: the call waited for the device")
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.synchronize(subject.device)
        taken = torch.cuda.memory_allocated(subject.device) - before
        expect(taken == 0, f"M = {rows}: a call leaves {taken} bytes taken")
        expect(_segments(subject.device) == asked, f"M = {rows}: a call asks the driver for memory")
    return "no waiting, no memory taken"


@check("stream")
def _check_stream(case: Case, subject: BackendSubject) -> str:
    layer = _on_cuda(case, subject)
    for rows in case.rows:
        given = draw(case, layer, rows)
        x = torch.full_like(given, torch.nan)
        out = torch.full((rows, layer.weight.out_features), torch.nan, dtype=case.dtype, device=layer.device)
        torch.cuda.synchronize(subject.device)
        stream = torch.cuda.Stream(subject.device)
        with torch.no_grad(), torch.cuda.stream(stream):
            torch.cuda._sleep(_BUSY_CYCLES)  # noqa: SLF001  # as above
            x.copy_(given)
            layer(x, out=out)
        stream.synchronize()
        judge_call(layer, given, out)
    return "after the work before it on the stream"


_DRAWS = 400
_ROWS = 8
_NORMAL = 9.0
"""From this variance on, the number of draws that went up follows the normal law closely enough."""
_MOST_ONE = 6.0
_MOST_ALL = 5.0


def _levels(kind: Format) -> NDArray[np.float64]:
    """Return the values of the codes under a scale of one, rising."""
    codebook = kind.codebook or tuple(float(code - 8) for code in range(16))
    return np.unique(np.asarray(codebook, dtype=np.float64))


@check("stochastic")
def _check_stochastic(case: Case, subject: BackendSubject) -> str:
    if Rounding.STOCHASTIC not in subject.backend.capabilities.roundings:
        raise NotDeclaredError("stochastic rounding is not declared")
    kind = case.weight_recipe.format
    generator = torch.Generator().manual_seed(case.seeds[0])
    levels = _levels(kind)
    low, high = float(levels[0]), float(levels[-1])
    dense = torch.rand(_ROWS, 2 * kind.block_size, generator=generator) * (high - low) + low
    dense[:, :: kind.block_size] = high if abs(high) >= abs(low) else low  # so that every block's scale is one
    plain = quantize_ref(dense, kind.name)
    quantize = quantiser_of(subject, plain, dense.dtype)

    def drawn(seed: int) -> PackedWeight:
        weight: PackedWeight = quantize(dense, rounding=Rounding.STOCHASTIC, seed=seed)
        return weight.to("cpu")

    first = drawn(0)
    expect(np.array_equal(exact_weight(drawn(0)), exact_weight(first)), "the same seed gave other codes")
    expect(not np.array_equal(exact_weight(drawn(1)), exact_weight(first)), "another seed gave the same codes")
    steps = np.repeat(decode_scales(first).astype(np.float64), kind.block_size, axis=1)
    value = dense.to(torch.float64).numpy()
    place = np.clip(np.searchsorted(levels, value / steps, side="right") - 1, 0, len(levels) - 2)
    below, above = levels[place] * steps, levels[place + 1] * steps
    total = np.zeros_like(value)
    for seed in range(_DRAWS):
        got = exact_weight(drawn(seed))
        near = (np.abs(got - below) <= 1e-6 * steps) | (np.abs(got - above) <= 1e-6 * steps)
        expect(near.all(), f"seed {seed}: {int((~near).sum())} values became none of their neighbours")
        total += got
    chance = np.clip((value - below) / (above - below), 0.0, 1.0)
    spread = (above - below) * np.sqrt(chance * (1 - chance) / _DRAWS)
    inside = chance * (1 - chance) * _DRAWS >= _NORMAL
    deviation = (total / _DRAWS - value)[inside] / spread[inside]
    worst, together = float(np.abs(deviation).max()), float(abs(deviation.sum()) / np.sqrt(deviation.size))
    expect(worst < _MOST_ONE, f"one mean is {worst:.2f} standard deviations off, {_MOST_ONE:g} at most")
    expect(
        together < _MOST_ALL, f"all means together are {together:.2f} standard deviations off, {_MOST_ALL:g} at most"
    )
    return f"{deviation.size} values in {_DRAWS} draws, worst {worst:.2f} σ, together {together:.2f} σ"
