"""Check of every mix of override, compute path and availability: who serves, and what record and events say of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.checks.policy import require_kernels
from q4_conformance.contract.case import check, expect, within
from q4_conformance.measurement.recording import Recording, recorded, unique
from q4_conformance.outcome import NotDeclaredError
from q4_conformance.subjects.backend import make_registry
from q4_conformance.subjects.reference import REFERENCE, reference_backend
from q4_conformance.subjects.wrappers import Proxy, unavailable
from q4core import (
    ActivationPrecision,
    BackendUnavailableError,
    ComputePath,
    PolicyConflictError,
    Q4Error,
    ReasonCode,
    Request,
    Session,
    UnknownBackendError,
    select,
)

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4core import Backend, Diagnostics, PackedWeight

_UNKNOWN = "no-backend-has-this-name"
_AVAILABILITIES = ("available", "refused", "broken", "leaving", "absent")
_CODES = {"refused": ReasonCode.NOT_BUILT, "broken": ReasonCode.PLUGIN_ERROR, "leaving": ReasonCode.PLUGIN_ERROR}
_STATES = {"refused": "missing", "broken": "failed", "leaving": "failed"}
"""Availability → what is recorded of the native part."""


@attrs.frozen
class _Expected:
    """What a mix of override, compute path and availability must lead to: an error, or who serves."""

    error: type[Q4Error] | None = None
    winner: str = REFERENCE
    is_fallback: bool = False


def _expected(  # noqa: PLR0911  # one return per rule of the contract
    override: str | None, path: ComputePath, availability: str, subject: str
) -> _Expected:
    """Return the outcome, by the words of the contract rather than by the dispatcher's code."""
    can = availability == "available"
    if override == _UNKNOWN or (override == subject and availability == "absent"):
        return _Expected(UnknownBackendError)
    if path is ComputePath.DEQUANT_MATMUL_ONLY:
        if override == subject:
            return _Expected(PolicyConflictError if can else BackendUnavailableError)
        return _Expected()
    if override == REFERENCE:
        if path is ComputePath.KERNEL_ONLY:
            return _Expected(PolicyConflictError)
        return _Expected(is_fallback=path is ComputePath.KERNEL_OR_FALLBACK)
    if can:
        return _Expected(winner=subject)
    if path is ComputePath.KERNEL_OR_FALLBACK:
        return _Expected(is_fallback=True)
    if path is ComputePath.KERNEL_ONLY or override == subject:
        return _Expected(BackendUnavailableError)
    return _Expected()


def _others(subject: BackendSubject, availability: str) -> tuple[Backend, ...]:
    """Return the subject as it is available, or nothing."""
    message = unique("set by the kit")
    others: dict[str, tuple[Backend, ...]] = {
        "available": (subject.backend,),
        "refused": (unavailable(subject.backend, message),),
        "broken": (Proxy(subject.backend, verdict=RuntimeError(message)),),
        "leaving": (Proxy(subject.backend, verdict=SystemExit(message)),),  # which must not end the process
        "absent": (),
    }
    return others[availability]


@check("mix")
def _check_mix(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    require_kernels(subject, case, weight)
    if subject.name == REFERENCE:
        raise NotDeclaredError("the reference is no kernel backend")
    mixes = [*itertools.product((None, subject.name, REFERENCE, _UNKNOWN), ComputePath)]
    facts: dict[str, Any] = {"activation_precision": ActivationPrecision.EXACT, "compute_dtype": case.dtype}
    for availability in _AVAILABILITIES:
        registry = make_registry(*_others(subject, availability), reference_backend())
        states = {REFERENCE: "available"} | ({} if availability == "absent" else {subject.name: availability})
        for override, path in mixes:
            config = subject.config(backend=override, compute_path=path, **facts)
            expected = _expected(override, path, availability, subject.name)
            with within(f"override {override!r}, {path.value}, {availability}"):
                _check_one_mix(case, weight, Session(config, registry=registry), expected, states)
    return f"{len(_AVAILABILITIES) * len(mixes)} mixes"


def _check_one_mix(
    case: Case, weight: PackedWeight, session: Session, expected: _Expected, states: dict[str, str]
) -> None:
    """Judge what a session makes of a weight; ``states`` says of each backend that is there how available it is."""
    with recorded() as recording:
        try:
            module = session.linear(weight)
        except Q4Error as error:
            expect(type(error) is expected.error, f"{type(error).__name__} instead of {expected}: {error}")
            _expect_error_complete(error, states)
            return
    expect(expected.error is None, f"served, although {expected.error} must be raised")
    record, config, winner = module.diagnostics(), session.config, expected.winner
    expect(record.format == weight.format.name, f"format {record.format!r}")
    expect(record.backend == winner, f"{record.backend!r} serves instead of {winner!r}")
    expect(record.compute_path is config.compute_path, f"compute path {record.compute_path!r}")
    request = Request.for_weight(weight, precision=ActivationPrecision.EXACT, device=module.device, dtype=case.dtype)
    asked = select(request, config, registry=session.registry).backend_request
    state = session.registry.backends()[winner].check(asked).native_state
    what = f"the native state is {record.native_load_state!r}, the backend says {state!r}"
    expect(record.native_load_state == state, what)
    expect(bool(record.fallback_reason) == expected.is_fallback, f"fallback reason {record.fallback_reason!r}")
    rejected = {item.backend: item for item in record.rejections}
    expect(set(rejected) == set(states) - {winner}, f"rejections of {sorted(rejected)}, there are {sorted(states)}")
    for name, item in rejected.items():
        codes = [reason.code for reason in item.reasons]
        expect(codes, f"{name!r} is rejected without a reason")
        code, native = _CODES.get(states[name]), _STATES.get(states[name])
        expect(code is None or code in codes, f"{name!r} is rejected for {codes}")
        what = f"{name!r} is rejected with the native state {item.native_state!r}, not {native!r}"
        expect(native is None or item.native_state == native, what)
    _expect_ran(case, weight, module)
    _expect_events(recording, record)


def _expect_error_complete(error: Q4Error, states: dict[str, str]) -> None:
    if isinstance(error, UnknownBackendError):
        expect(error.available, "the error does not say which backends there are")
    elif isinstance(error, BackendUnavailableError):
        expect(error.rejections, "the error carries no rejection")
        rejected = {item.backend: [reason.code for reason in item.reasons] for item in error.rejections}
        for name, state in states.items():
            expect(state not in _CODES or _CODES[state] in rejected.get(name, ()), f"rejections {rejected}")
    else:
        expect(error.hint, "the error does not say what to do")


def _expect_ran(case: Case, weight: PackedWeight, module: Any) -> None:
    paths = {segment.path.name for segment in module.diagnostics().segments}
    for rows in case.rows:
        before = module.diagnostics()
        module(torch.zeros(rows, weight.in_features, dtype=case.dtype, device=module.device))
        after = module.diagnostics()
        calls = zip(after.segments, before.calls, after.calls, strict=True)
        ticked = [segment for segment, old, new in calls if new == old + 1]
        expect(len(ticked) == 1 and sum(after.calls) == sum(before.calls) + 1, f"calls {after.calls}")
        expect(ticked[0].path.covers(rows), f"M = {rows} is recorded as {ticked[0]}")
        expect(after.path_name in paths, f"path {after.path_name!r}")


def _expect_events(recording: Recording, record: Diagnostics) -> None:
    selected = recording.named("q4.select")
    expect(len(selected) == 1, f"{len(selected)} events q4.select")
    for field, value in (
        ("backend", record.backend),
        ("format", record.format),
        ("compute_path", record.compute_path.value),
        ("fallback_reason", record.fallback_reason),
        ("native_load_state", record.native_load_state),
        ("paths", list(dict.fromkeys(segment.path.name for segment in record.segments))),
        ("rejections", [str(item) for item in record.rejections]),
        ("proven", record.proven),
    ):
        got = selected[0].get(field)
        expect(got == value, f"the event says {field} = {got!r}, not {value!r}")
    reasons = [record.fallback_reason] if record.fallback_reason else []
    logged = [fields.get("reason") for fields in recording.named("q4.fallback")]
    expect(logged == reasons, f"the events q4.fallback say {logged}, not {reasons}")
