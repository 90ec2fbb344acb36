"""Checks of choices and refusals: who is asked for serves or refuses, and what does not fit is refused at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.checks.values import draw, judged_calls
from q4_conformance.contract.case import check, expect, raised
from q4_conformance.measurement.recording import recorded, unique
from q4_conformance.outcome import FailureError, NotDeclaredError
from q4_conformance.subjects.backend import BackendLayer, BackendSubject, make_registry
from q4_conformance.subjects.reference import reference_backend
from q4_conformance.subjects.wrappers import Proxy, unavailable
from q4core import (
    ActivationPrecision,
    BackendUnavailableError,
    ComputePath,
    InputError,
    PathKind,
    Q4Error,
    Q4FallbackWarning,
    ReasonCode,
    Request,
    ScaleKind,
    Session,
    SessionConfig,
    WeightError,
)
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_conformance.contract.case import Case
    from q4core import KernelPath, PackedWeight

_SAMPLE_ROWS = (1, 2, 15, 16, 17, 64, 127, 128, 129, 4096)


def serves_kernels(subject: BackendSubject, case: Case, weight: PackedWeight) -> tuple[KernelPath, ...]:
    """Return the exact paths of kind KERNEL that the subject offers for every M, or () where they leave a gap."""
    request = subject.request(weight, dtype=case.dtype, precision=ActivationPrecision.EXACT)
    subject.require_declared(request)
    try:
        offered = subject.backend.check(request).paths
    except PLUGIN_FAULTS as error:
        raise FailureError(f"check raised {describe_exception(error)}") from error
    paths = tuple(path for path in offered if path.kind is PathKind.KERNEL and path.precision.is_exact)
    covered = all(any(path.covers(rows) for path in paths) for rows in _SAMPLE_ROWS)
    return paths if covered and any(path.m[1] is None for path in paths) else ()


def require_kernels(subject: BackendSubject, case: Case, weight: PackedWeight) -> None:
    """Raise ``NotDeclaredError`` where there are none."""
    if not serves_kernels(subject, case, weight):
        raise NotDeclaredError("no kernel path for every M is offered")


@check("override")
def _check_override(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    policies = [ComputePath.AUTO]
    if serves_kernels(subject, case, weight):
        policies += [ComputePath.KERNEL_ONLY, ComputePath.KERNEL_OR_FALLBACK]
    request = subject.request(weight, dtype=case.dtype, precision=ActivationPrecision.EXACT)
    offered = subject.backend.check(request).paths
    if any(path.kind is PathKind.REFERENCE for path in offered):
        policies.append(ComputePath.DEQUANT_MATMUL_ONLY)
    for policy in policies:
        layer = subject.layer(weight, dtype=case.dtype, compute_path=policy)
        judged_calls(layer, [draw(case, layer, rows) for rows in case.rows])
        record = layer.diagnostics()
        expect(record.backend == subject.name, f"{policy.value}: {record.backend!r} serves")
        expect(record.compute_path is policy, f"{policy.value}: recorded as {record.compute_path!r}")
        names = {path.name for path in offered}
        expect(record.path_name in names, f"{policy.value}: path {record.path_name!r} was not offered")
        expect(record.fallback_reason is None, f"{policy.value}: fallback {record.fallback_reason!r}")
        expect(record.proven, f"{policy.value}: the paths are not proven")
    return ", ".join(policy.value for policy in policies)


@check("unavailable")
def _check_unavailable(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    require_kernels(subject, case, weight)
    message = unique("the native library is missing")
    registry = make_registry(unavailable(subject.backend, message))
    config = subject.config(compute_path=ComputePath.KERNEL_ONLY, compute_dtype=case.dtype)
    with recorded() as record:
        call = functools.partial(Session(config, registry=registry).linear, weight)
        error = raised(BackendUnavailableError, call, "KERNEL_ONLY was served by an unavailable backend")
        codes = {item.backend: [reason.code for reason in item.reasons] for item in error.rejections}
        expect(codes.get(subject.name) == [ReasonCode.NOT_BUILT], f"the error gives the rejections {codes}")
        expect(message in str(error), f"the reason is not in the message: {error}")
        expect(not record.of(Q4FallbackWarning), "a refusal warned of a fallback")
        session = Session(attrs.evolve(config, compute_path=ComputePath.KERNEL_OR_FALLBACK), registry=registry)
        modules = [session.linear(weight), session.linear(weight)]
        for module in modules:
            diagnostics = module.diagnostics()
            expect(diagnostics.backend == reference_backend().name, f"{diagnostics.backend!r} serves as the fallback")
            expect(message in (diagnostics.fallback_reason or ""), f"reason {diagnostics.fallback_reason!r}")
    warned = record.of(Q4FallbackWarning)
    expect(len(warned) == 1 and message in warned[0], f"one warning with the reason must be given, got {warned}")
    expect(len(record.named("q4.fallback")) == len(modules), f"events {[name for name, _ in record.events]}")
    paths = modules[0].diagnostics().segments[0].path
    fallback = BackendLayer(modules[0], weight, None, session, lambda _: paths)
    judged_calls(fallback, [draw(case, fallback, rows) for rows in case.rows])
    return "refused with reasons; fallback with a reason, a warning and the right numbers"


@check("cuda_only")
def _check_cuda_only(case: Case, subject: BackendSubject) -> str:
    """A backend for CUDA alone, asked to run on the CPU, is refused at once with its reasons, never replaced.

    A backend that declares more is judged as if it declared CUDA alone; no case of it needs a GPU.
    """
    weight = case.weight()
    manifest = attrs.evolve(subject.backend.capabilities, devices=frozenset({"cuda"}))
    reasons = manifest.refusals(Request.for_weight(weight, device="cuda", dtype=case.dtype))
    if reasons:
        raise NotDeclaredError("; ".join(reason.message for reason in reasons))
    for override, with_reference in ((subject.name, True), (subject.name, False), (None, False)):
        proxy = Proxy(subject.backend, capabilities=manifest)
        registry = make_registry(proxy, with_reference=with_reference)
        config = SessionConfig(device="cpu", backend=override, compute_path=ComputePath.KERNEL_ONLY)
        call = functools.partial(Session(config, registry=registry).linear, weight)
        error = raised(BackendUnavailableError, call, "a CUDA-only backend served on the CPU")
        codes = [reason.code for item in error.rejections if item.backend == subject.name for reason in item.reasons]
        expect(ReasonCode.DEVICE in codes, f"the reasons are {[code.value for code in codes]}")
        expect(proxy.checks == 0, "the backend was asked although its manifest refuses the device")
    return "by override, with and without the reference; alone installed"


_NAME = "model.layers.7.mlp.up_proj"


def _damaged(weight: PackedWeight) -> Iterator[tuple[str, PackedWeight]]:
    """Yield weights whose numbers no checkpoint may hold."""
    nan_bytes = {ScaleKind.E8M0: 255, ScaleKind.E4M3: 0x7F, ScaleKind.E4M3_MUL: 0x7F, ScaleKind.E4M3_DIV: 0x7F}
    if weight.scale_kind in nan_bytes:
        stored = weight.scale.clone().view(torch.uint8)
        stored.view(-1)[-1] = nan_bytes[weight.scale_kind]
        yield "a NaN scale", attrs.evolve(weight, scale=stored.view(weight.scale.dtype))
    for field in ("scale", "global_scale", "nested_scale", "offset", "zero", "input_channel_scale"):
        tensor = getattr(weight, field)
        if tensor is None or tensor.dtype not in {torch.float32, torch.float16, torch.bfloat16}:
            continue
        for value in (float("nan"), float("inf")):
            spoilt = tensor.clone()
            spoilt.view(-1)[-1] = value
            yield f"{value} in {field}", attrs.evolve(weight, **{field: spoilt})


_Bad = tuple[str, "torch.Tensor | list[list[float]]", dict[str, torch.Tensor], str]
"""What is wrong, x, further arguments, and the legal choice that the error must name."""


def _bad_inputs(case: Case, weight: PackedWeight, device: torch.device) -> Iterator[_Bad]:
    inputs, outputs, dtype = weight.in_features, weight.out_features, case.dtype
    good = torch.zeros(3, inputs, dtype=dtype, device=device)
    wide = good.new_zeros(3, max(inputs, outputs))
    yield "one in-feature too many", good.new_zeros(3, inputs + 1), {}, str(inputs)
    yield "one in-feature too few", good.new_zeros(3, inputs - 1), {}, str(inputs)
    yield "no in-features", good.new_zeros(3, 0), {}, str(inputs)
    yield "rank 0", good.new_zeros(()), {}, str(inputs)
    for other in {torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8} - {dtype}:
        yield f"dtype {other}", good.to(other), {}, str(dtype)
    yield "another device", torch.zeros(3, inputs, dtype=dtype, device="meta"), {}, str(device)
    yield "no tensor", [[0.0] * inputs], {}, "tensor"
    yield "out= of another shape", good, {"out": good.new_zeros(3, outputs + 1)}, f"[3, {outputs}]"
    yield "out= of another dtype", good, {"out": torch.zeros(3, outputs, device=device).to(torch.float64)}, str(dtype)
    yield "out= over x", wide[:, :inputs], {"out": wide[:, :outputs]}, "memory"


@check("refusals")
def _check_refusals(case: Case, subject: BackendSubject) -> str:
    weight = attrs.evolve(case.weight(), name=_NAME)
    layer = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    count = 0

    def refuse(what: str, call: Callable[[], object], kind: type[Q4Error], legal: str, name: str = _NAME) -> None:
        nonlocal count
        count += 1
        error = raised(kind, call, f"{what} was accepted")
        expect(name in str(error), f"{what}: the error does not name the layer: {error}")
        expect(error.rule, f"{what}: the error does not say the rule: {error}")
        expect(legal in str(error), f"{what}: the error does not name the legal choice {legal!r}: {error}")
        expect(error.hint, f"{what}: the error does not say what to do: {error}")

    before = sum(layer.diagnostics().calls)
    for what, x, arguments, legal in _bad_inputs(case, weight, layer.device):
        refuse(what, functools.partial(layer.module, x, **arguments), InputError, legal)
    expect(sum(layer.diagnostics().calls) == before, "a refused call ran")
    make, outputs = layer.session.linear, weight.out_features
    for what, bias in (
        ("a bias that is too long", torch.zeros(outputs + 1)),
        ("a bias of integers", torch.zeros(outputs, dtype=torch.int64)),
        ("a bias of rank 2", torch.zeros(1, outputs)),
    ):
        refuse(what, functools.partial(make, weight, bias), InputError, f"[{outputs}]")
    dense: Any = torch.zeros(weight.shape)
    refuse("a dense weight", functools.partial(make, dense), InputError, "PackedWeight", name="session.linear")
    for what, spoilt in _damaged(weight):
        refuse(what, functools.partial(make, spoilt), WeightError, "finite")
    return f"{count} refusals"
