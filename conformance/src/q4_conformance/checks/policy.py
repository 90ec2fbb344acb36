"""Checks of choices: an override is obeyed or refused, never replaced, and the record of it is true."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.checks.values import draw, judge_call
from q4_conformance.outcome import FailureError, NotDeclaredError
from q4_conformance.proxies import Proxy, broken, leaving, unavailable
from q4_conformance.recording import Recording, recorded, unique
from q4_conformance.reference import reference_backend
from q4_conformance.subject import BackendLayer, BackendSubject, make_registry
from q4_conformance.table import check, expect
from q4core import (
    ActivationPrecision,
    BackendUnavailableError,
    ComputePath,
    PathKind,
    PolicyConflictError,
    Q4Error,
    Q4FallbackWarning,
    ReasonCode,
    Session,
    SessionConfig,
    UnknownBackendError,
)

if TYPE_CHECKING:
    from q4_conformance.table import Case
    from q4core import Diagnostics, KernelPath, PackedWeight, Registry

__all__ = ["serves_kernels"]

_SAMPLE_ROWS = (1, 2, 15, 16, 17, 64, 127, 128, 129, 4096)
_NOBODY = "nobody-has-this-name"


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


def _require_kernels(subject: BackendSubject, case: Case, weight: PackedWeight) -> tuple[KernelPath, ...]:
    paths = serves_kernels(subject, case, weight)
    if not paths:
        raise NotDeclaredError("no kernel path for every M is offered")
    return paths


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
    _require_kernels(subject, case, weight)
    message = unique("the native library is missing")
    registry = make_registry(unavailable(subject.backend, message))
    config = subject.config(compute_path=ComputePath.KERNEL_ONLY, compute_dtype=case.dtype)
    with recorded() as record:
        try:
            Session(config, registry=registry).linear(weight)
        except BackendUnavailableError as error:
            told = {item.backend: [reason.code for reason in item.reasons] for item in error.rejections}
            expect(told.get(subject.name) == [ReasonCode.NOT_BUILT], f"the error gives the rejections {told}")
            expect(message in str(error), f"the reason is not in the message: {error}")
        else:
            raise FailureError("KERNEL_ONLY was served by an unavailable backend")
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
    """A backend for CUDA alone, asked to run on the CPU, is refused at once with its reasons, never replaced."""
    weight = case.weight()
    subject.require_declared(subject.request(weight, dtype=case.dtype))
    manifest = attrs.evolve(subject.backend.capabilities, devices=frozenset({"cuda"}))
    for override, with_reference in ((subject.name, True), (subject.name, False), (None, False)):
        proxy = Proxy(subject.backend, capabilities=manifest)
        registry = make_registry(proxy, with_reference=with_reference)
        config = SessionConfig(device="cpu", backend=override, compute_path=ComputePath.KERNEL_ONLY)
        try:
            Session(config, registry=registry).linear(weight)
        except BackendUnavailableError as error:
            codes = [
                reason.code for item in error.rejections if item.backend == subject.name for reason in item.reasons
            ]
            expect(ReasonCode.DEVICE in codes, f"the reasons are {[code.value for code in codes]}")
        else:
            raise FailureError("a CUDA-only backend served on the CPU")
        expect(proxy.checks == 0, "the backend was asked although its manifest refuses the device")
    return "by override, with and without the reference; alone installed"


_AVAILABILITIES = ("available", "refused", "broken", "leaving", "absent")
_CODES = {
    "refused": ReasonCode.NOT_BUILT,
    "broken": ReasonCode.PLUGIN_ERROR,
    "leaving": ReasonCode.PLUGIN_ERROR,
}


@attrs.frozen
class _Expected:
    """What a mix of override, compute path and availability must lead to."""

    error: type[Q4Error] | None = None
    is_subject: bool = False
    is_fallback: bool = False


def _expected(  # noqa: PLR0911  # one return per rule of the contract
    override: str | None, path: ComputePath, availability: str, names: tuple[str, str]
) -> _Expected:
    """Return the outcome, by the words of the contract rather than by the dispatcher's code."""
    subject, reference = names
    can = availability == "available"
    if override == _NOBODY or (override == subject and availability == "absent"):
        return _Expected(UnknownBackendError)
    if path is ComputePath.DEQUANT_MATMUL_ONLY:
        if override == subject:
            return _Expected(PolicyConflictError if can else BackendUnavailableError)
        return _Expected()
    if override == reference:
        if path is ComputePath.KERNEL_ONLY:
            return _Expected(PolicyConflictError)
        return _Expected(is_fallback=path is ComputePath.KERNEL_OR_FALLBACK)
    if can:
        return _Expected(is_subject=True)
    if path is ComputePath.KERNEL_OR_FALLBACK:
        return _Expected(is_fallback=True)
    if path is ComputePath.KERNEL_ONLY or override == subject:
        return _Expected(BackendUnavailableError)
    return _Expected()


@check("mix")
def check_mix(case: Case, subject: BackendSubject) -> str:
    """Diagnostics are complete and true in every mix of override, compute path and availability."""
    weight = case.weight()
    _require_kernels(subject, case, weight)
    reference = reference_backend().name
    if subject.name == reference:
        raise NotDeclaredError("the reference is no kernel backend")
    count = 0
    for availability in _AVAILABILITIES:
        message = unique("told so by the kit")
        stands = {
            "available": (subject.backend,),
            "refused": (unavailable(subject.backend, message),),
            "broken": (broken(subject.backend, message),),
            "leaving": (leaving(subject.backend, message),),
            "absent": (),
        }[availability]
        registry = make_registry(*stands, reference_backend())
        overrides = (None, subject.name, reference, _NOBODY)
        for override, path in itertools.product(overrides, ComputePath):
            expected = _expected(override, path, availability, (subject.name, reference))
            where = f"override {override!r}, {path.value}, {availability}"
            config = SessionConfig(
                device=str(subject.device),
                backend=override,
                compute_path=path,
                activation_precision=ActivationPrecision.EXACT,
                compute_dtype=case.dtype,
            )
            _check_one_mix(case, weight, config, registry, expected, where, (subject.name, reference, availability))
            count += 1
    return f"{count} mixes"


def _check_one_mix(  # noqa: PLR0913  # the facts of one mix
    case: Case,
    weight: PackedWeight,
    config: SessionConfig,
    registry: Registry,
    expected: _Expected,
    where: str,
    facts: tuple[str, str, str],
) -> None:
    subject, reference, availability = facts
    session = Session(config, registry=registry)
    with recorded() as recording:
        try:
            module = session.linear(weight)
        except Q4Error as error:
            expect(type(error) is expected.error, f"{where}: {type(error).__name__} instead of {expected}: {error}")
            _expect_error_complete(error, where, facts)
            return
    expect(expected.error is None, f"{where}: served, although {expected.error} must be raised")
    record = module.diagnostics()
    winner = subject if expected.is_subject else reference
    expect(record.format == weight.format.name, f"{where}: format {record.format!r}")
    expect(record.backend == winner, f"{where}: {record.backend!r} serves instead of {winner!r}")
    expect(record.compute_path == config.compute_path.value, f"{where}: compute path {record.compute_path!r}")  # type: ignore[union-attr]  # set above
    expect(record.native_load_state, f"{where}: the native state is empty")
    told = bool(record.fallback_reason)
    expect(told == expected.is_fallback, f"{where}: fallback reason {record.fallback_reason!r}")
    others = {subject: availability, reference: "available"}
    if availability == "absent":
        del others[subject]
    del others[winner]
    rejected = {item.backend: [reason.code for reason in item.reasons] for item in record.rejections}
    expect(set(rejected) == set(others), f"{where}: rejections of {sorted(rejected)}, others are {sorted(others)}")
    for name, state in others.items():
        expect(rejected[name], f"{where}: {name!r} is rejected without a reason")
        if state in _CODES:
            expect(_CODES[state] in rejected[name], f"{where}: {name!r} is rejected for {rejected[name]}")
    _expect_ran(case, weight, module, where)
    _expect_events(recording, record, where, is_fallback=expected.is_fallback)


def _expect_error_complete(error: Q4Error, where: str, facts: tuple[str, str, str]) -> None:
    subject, _, availability = facts
    if isinstance(error, UnknownBackendError):
        expect(error.available, f"{where}: the error does not say which backends there are")
    elif isinstance(error, BackendUnavailableError):
        expect(error.rejections, f"{where}: the error carries no rejection")
        rejected = {item.backend: [reason.code for reason in item.reasons] for item in error.rejections}
        if availability in _CODES:
            expect(_CODES[availability] in rejected.get(subject, ()), f"{where}: rejections {rejected}")
    else:
        expect(error.hint, f"{where}: the error does not say what to do")


def _expect_ran(case: Case, weight: PackedWeight, module: Any, where: str) -> None:
    paths = {segment.path.name: segment for segment in module.diagnostics().segments}
    for rows in case.rows:
        before = module.diagnostics()
        x = torch.zeros(rows, weight.in_features, dtype=case.dtype, device=module.device)
        module(x)
        after = module.diagnostics()
        ticked = [
            segment
            for segment, old, new in zip(after.segments, before.calls, after.calls, strict=True)
            if new == old + 1
        ]
        expect(len(ticked) == 1 and sum(after.calls) == sum(before.calls) + 1, f"{where}: calls {after.calls}")
        expect(ticked[0].path.covers(rows), f"{where}: M = {rows} is recorded as {ticked[0]}")
        expect(after.path_name in paths, f"{where}: path {after.path_name!r}")


def _expect_events(recording: Recording, record: Diagnostics, where: str, *, is_fallback: bool) -> None:
    selected = recording.named("q4.select")
    expect(len(selected) == 1, f"{where}: {len(selected)} events q4.select")
    facts = selected[0]
    for field, value in (
        ("backend", record.backend),
        ("format", record.format),
        ("compute_path", record.compute_path),
        ("fallback_reason", record.fallback_reason),
        ("proven", record.proven),
    ):
        expect(facts.get(field) == value, f"{where}: the event says {field} = {facts.get(field)!r}, not {value!r}")
    expect(len(facts.get("rejections", ())) == len(record.rejections), f"{where}: the event's rejections differ")
    expect(bool(recording.named("q4.fallback")) == is_fallback, f"{where}: event q4.fallback")
