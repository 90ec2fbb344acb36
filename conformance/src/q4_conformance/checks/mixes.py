"""Check of every mix of override, compute path and availability: who serves, and what record and events say of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.checks.policy import require_kernels
from q4_conformance.contract.case import check, expect
from q4_conformance.measurement.recording import Recording, recorded, unique
from q4_conformance.outcome import NotDeclaredError
from q4_conformance.subjects.backend import BackendSubject, make_registry
from q4_conformance.subjects.reference import reference_backend
from q4_conformance.subjects.wrappers import broken, leaving, unavailable
from q4core import (
    ActivationPrecision,
    BackendUnavailableError,
    ComputePath,
    PolicyConflictError,
    Q4Error,
    ReasonCode,
    Request,
    Session,
    SessionConfig,
    UnknownBackendError,
    select,
)

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4core import Diagnostics, PackedWeight, Registry

_NOBODY = "nobody-has-this-name"
_AVAILABILITIES = ("available", "refused", "broken", "leaving", "absent")
_CODES = {"refused": ReasonCode.NOT_BUILT, "broken": ReasonCode.PLUGIN_ERROR, "leaving": ReasonCode.PLUGIN_ERROR}
_STATES = {"refused": "missing", "broken": "failed", "leaving": "failed"}
"""Availability → what is recorded of the native part."""


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
    require_kernels(subject, case, weight)
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
    expect(record.compute_path is config.compute_path, f"{where}: compute path {record.compute_path!r}")
    state = registry.backends()[winner].check(_asked(weight, config, registry)).native_state
    expect(
        record.native_load_state == state,
        f"{where}: the native state is {record.native_load_state!r}, the backend says {state!r}",
    )
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
    for item in record.rejections:
        if others[item.backend] in _STATES:
            wanted = _STATES[others[item.backend]]
            what = f"{where}: {item.backend!r} is rejected with the native state"
            expect(item.native_state == wanted, f"{what} {item.native_state!r}, not {wanted!r}")
    _expect_ran(case, weight, module, where)
    _expect_events(recording, record, where, is_fallback=expected.is_fallback)


def _asked(weight: PackedWeight, config: SessionConfig, registry: Registry) -> Request:
    """Return the request as the winner sees it."""
    facts: dict[str, Any] = {"device": torch.device(str(config.device)), "dtype": config.compute_dtype}
    request = Request.for_weight(weight, precision=ActivationPrecision.EXACT, **facts)
    return select(request, config, registry=registry).backend_request


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
        ("compute_path", record.compute_path.value),
        ("fallback_reason", record.fallback_reason),
        ("native_load_state", record.native_load_state),
        ("paths", list(dict.fromkeys(segment.path.name for segment in record.segments))),
        ("rejections", [str(item) for item in record.rejections]),
        ("proven", record.proven),
    ):
        expect(facts.get(field) == value, f"{where}: the event says {field} = {facts.get(field)!r}, not {value!r}")
    reasons = [record.fallback_reason] if is_fallback else []
    told = [fields.get("reason") for fields in recording.named("q4.fallback")]
    expect(told == reasons, f"{where}: the events q4.fallback say {told}, not {reasons}")
