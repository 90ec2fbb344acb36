"""Checks of what matters on a device: its quantiser and FP4 path, who is picked, graphs, streams, and no waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.checks.policy import require_kernels
from q4_conformance.checks.values import check_noise, check_values, draw, judge_call
from q4_conformance.contract.case import check, expect
from q4_conformance.oracle.decoding import stored_bytes
from q4_conformance.outcome import FailureError, NotDeclaredError, NotTestableError
from q4_conformance.subjects.backend import make_registry
from q4core import ComputePath, PackedWeight, PathKind, Precision, Request, Session, SessionConfig, WeightSpec
from q4core import quantize as quantize_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendLayer, BackendSubject
    from q4core import Format

_BUSY_CYCLES = 100_000_000
"""About 50 ms of one multiprocessor: long beside any call here, short beside a test."""
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
def check_native_quantiser(case: Case, subject: BackendSubject) -> str:
    """The backend's quantiser gives the reference's layout and exactly its bytes."""
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
def check_native_product(case: Case, subject: BackendSubject) -> str:
    """With 4-bit activations: exact on their grid, and elsewhere as noisy as their quantiser makes it."""
    if Precision.W4A4 not in subject.backend.capabilities.precisions:
        raise NotDeclaredError("4-bit activations are not declared")
    return f"{check_values(case, subject)}; {check_noise(case, subject)}"


@check("picked")
def check_picked(case: Case, subject: BackendSubject) -> str:
    """Unasked, the dispatcher takes the kernel backend and not the reference, and the record says which path ran."""
    weight = case.weight()
    request = subject.request(weight, dtype=case.dtype)
    subject.require_declared(request)
    subject.require_hardware(request)
    require_kernels(subject, case, weight)
    config = SessionConfig(
        device=str(subject.device), compute_path=ComputePath.AUTO, activation_precision=case.precision,
        compute_dtype=case.dtype,
    )  # fmt: skip
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


def _on_cuda(case: Case, subject: BackendSubject) -> tuple[PackedWeight, BackendLayer]:
    if subject.device.type != "cuda":
        raise NotTestableError("graphs, streams and waiting are a CUDA device's")
    weight = case.weight()
    return weight, subject.layer(weight, dtype=case.dtype, precision=case.precision)


@check("graph")
def check_graph(case: Case, subject: BackendSubject) -> str:
    """Captured in a CUDA graph and replayed on new inputs, a layer gives the bits of plain calls."""
    weight, layer = _on_cuda(case, subject)
    for rows in case.rows:
        draws = [draw(case, layer, weight, rows, seed) for seed in case.seeds]
        expected = [layer(x).clone() for x in draws]
        x, out = draws[0].clone(), torch.empty_like(expected[0])
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            layer(x, out=out)
        for given, wanted in zip(draws, expected, strict=True):
            x.copy_(given)
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize(subject.device)
            expect(torch.equal(out, wanted), f"M = {rows}: a replay gives other bits than a call")
            judge_call(layer, weight, given, out)
    return f"{len(case.rows)} graphs, {len(case.seeds)} replays of each"


def _segments(device: torch.device) -> int:
    """Return how often torch's allocator has asked the driver for memory."""
    return int(torch.cuda.memory_stats(device).get("segment.all.allocated", 0))


@check("quiet")
def check_quiet(case: Case, subject: BackendSubject) -> str:
    """A call with ``out=`` returns before the device has done the work before it, and asks the driver for no memory.

    Asking is what waits for the device and breaks a capture. What torch's allocator has kept may serve as a temporary,
    which is free at the end of the call.
    """
    weight, layer = _on_cuda(case, subject)
    for rows in case.rows:
        x = draw(case, layer, weight, rows, case.seeds[0])
        out = torch.empty(rows, weight.out_features, dtype=case.dtype, device=layer.device)
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
def check_stream(case: Case, subject: BackendSubject) -> str:
    """A call runs on the caller's stream: after what was put there before it."""
    weight, layer = _on_cuda(case, subject)
    for rows in case.rows:
        given = draw(case, layer, weight, rows, case.seeds[0])
        x = torch.full_like(given, torch.nan)
        out = torch.full((rows, weight.out_features), torch.nan, dtype=case.dtype, device=layer.device)
        torch.cuda.synchronize(subject.device)
        stream = torch.cuda.Stream(subject.device)
        with torch.no_grad(), torch.cuda.stream(stream):
            torch.cuda._sleep(_BUSY_CYCLES)  # noqa: SLF001  # as above
            x.copy_(given)
            layer(x, out=out)
        stream.synchronize()
        judge_call(layer, weight, given, out)
    return "after what stands before it on the stream"
