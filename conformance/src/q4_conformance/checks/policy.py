"""Checks of choices: an override is obeyed or refused, never replaced, and the record of it is true."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs

from q4_conformance.checks.values import draw, judge_call
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
    PathKind,
    Q4FallbackWarning,
    ReasonCode,
    Request,
    Session,
    SessionConfig,
)

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4core import KernelPath, PackedWeight

_SAMPLE_ROWS = (1, 2, 15, 16, 17, 64, 127, 128, 129, 4096)


def serves_kernels(subject: BackendSubject, case: Case, weight: PackedWeight) -> tuple[KernelPath, ...]:
    """Return the exact paths of kind KERNEL that the subject offers for every M, or () where they leave a gap."""
    request = subject.request(weight, dtype=case.dtype, precision=ActivationPrecision.EXACT)
    subject.require_declared(request)
    try:
        paths = tuple(path for path in subject.kernel_paths(request) if path.precision.is_exact)
    except (Exception, SystemExit) as error:
        raise FailureError(f"check raised {type(error).__name__}: {error}") from error
    covered = all(any(path.covers(rows) for path in paths) for rows in _SAMPLE_ROWS)
    return paths if covered and any(path.m[1] is None for path in paths) else ()


def require_kernels(subject: BackendSubject, case: Case, weight: PackedWeight) -> None:
    """Raise ``NotDeclaredError`` where there are none."""
    if not serves_kernels(subject, case, weight):
        raise NotDeclaredError("no kernel path for every M is offered")


def _run(layer: BackendLayer, case: Case, weight: PackedWeight) -> None:
    for rows in case.rows:
        x = draw(case, layer, weight, rows, case.seeds[0])
        judge_call(layer, weight, x, layer(x))


@check("override")
def check_override(case: Case, subject: BackendSubject) -> str:
    """Each compute path that the backend can serve is served by it, and the record says so."""
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
        _run(layer, case, weight)
        record = layer.diagnostics()
        expect(record.backend == subject.name, f"{policy.value}: {record.backend!r} serves")
        expect(record.compute_path == policy.value, f"{policy.value}: recorded as {record.compute_path!r}")
        names = {path.name for path in offered}
        expect(record.path_name in names, f"{policy.value}: path {record.path_name!r} was not offered")
        expect(record.fallback_reason is None, f"{policy.value}: fallback {record.fallback_reason!r}")
        expect(record.proven, f"{policy.value}: the paths are not proven")
    return ", ".join(policy.value for policy in policies)


@check("unavailable")
def check_unavailable(case: Case, subject: BackendSubject) -> str:
    """Without its native part: KERNEL_ONLY is an error with the reasons, KERNEL_OR_FALLBACK the reference with one."""
    weight = case.weight()
    require_kernels(subject, case, weight)
    message = unique("the native library is missing")
    registry = make_registry(unavailable(subject.backend, message))
    config = subject.config(compute_path=ComputePath.KERNEL_ONLY, compute_dtype=case.dtype)
    with recorded() as record:
        call = functools.partial(Session(config, registry=registry).linear, weight)
        error = raised(BackendUnavailableError, call, "KERNEL_ONLY was served by an unavailable backend")
        told = {item.backend: [reason.code for reason in item.reasons] for item in error.rejections}
        expect(told.get(subject.name) == [ReasonCode.NOT_BUILT], f"the error gives the rejections {told}")
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
    _run(BackendLayer(modules[0], session, lambda _: modules[0].diagnostics().segments[0].path), case, weight)
    return "refused with reasons; fallback with a reason, a warning and the right numbers"


@check("cuda_only")
def check_cuda_only(case: Case, subject: BackendSubject) -> str:
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
