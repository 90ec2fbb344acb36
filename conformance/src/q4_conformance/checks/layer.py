"""Checks of a layer besides its numbers: refusals, state, export, and the truth of its record."""

from __future__ import annotations

import copy
import functools
import io
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance.checks.values import draw, expect_same_bits, judge_call, judged_calls
from q4_conformance.contract.case import check, expect, raised
from q4_conformance.contract.cases import linear_cases
from q4_conformance.oracle.decoding import as_float64, decode_codes, decode_offsets, decode_scales, stored_bytes
from q4_conformance.oracle.exact import as_given, exact_weight
from q4_conformance.outcome import NotDeclaredError
from q4_conformance.subjects.backend import make_registry, not_declared
from q4_conformance.subjects.manifest import request_of, undeclared_reason
from q4_conformance.subjects.wrappers import Proxy
from q4core import (
    BUILTIN_FORMATS,
    EVERY_FORMAT,
    BackendUnavailableError,
    BlockOrder,
    Feature,
    PolicyConflictError,
    ReasonCode,
    Session,
    select,
)

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4core import PackedWeight


def expect_same_weight(got: PackedWeight, weight: PackedWeight, what: str) -> None:
    """Expect two weights of the same codes and scales; of the same stored levels too, where their scale kind is one."""
    difference = _difference(got, weight)
    expect(difference is None, f"{what} in its {difference}")


def _difference(got: PackedWeight, weight: PackedWeight) -> str | None:
    if not np.array_equal(decode_codes(got), decode_codes(weight)):
        return "codes"
    if decode_scales(got).tobytes() != decode_scales(weight).tobytes():
        return "scales"
    offsets = decode_offsets(weight), decode_offsets(got)
    numbers = ("zero", "codebook", "input_channel_scale", "input_permutation")
    for field, pair in {"offset": offsets, **{name: _numbers(name, weight, got) for name in numbers}}.items():
        if any(item is None for item in pair):
            if pair[0] is not pair[1]:
                return field
        elif not np.array_equal(*pair):
            return field
    return _stored_difference(got, weight) if got.scale_kind is weight.scale_kind else None


def _numbers(field: str, *weights: PackedWeight) -> tuple[Any, ...]:
    """Return the numbers of a field; where one weight alone has zero points, the middle ones of the other."""
    found = [None if (item := getattr(weight, field)) is None else as_float64(item) for weight in weights]
    stored = next((item for item in found if item is not None), None)
    if field == "zero" and stored is not None:
        found = [np.full_like(stored, weights[0].format.middle) if item is None else item for item in found]
    return tuple(found)


def _stored_difference(got: PackedWeight, weight: PackedWeight) -> str | None:
    for field in ("scale", "offset", "global_scale", "nested_codebook", "nested_scale", "nested_offset"):
        ours, theirs = getattr(weight, field), getattr(got, field)
        if ours is None:
            continue
        if theirs is None or ours.dtype != theirs.dtype or stored_bytes(ours) != stored_bytes(theirs):
            return f"stored level {field}"
    return None


@check("export")
def _check_export(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    layer = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    got = layer.module.packed_weight()
    expect_same_weight(got, as_given(weight), "the exported weight differs")
    request = subject.request(weight, dtype=case.dtype, precision=case.precision)
    declared = weight.scale_kind in subject.backend.capabilities.readable_kinds(request)
    expect(not declared or got.scale_kind is weight.scale_kind, f"scale levels collapsed to {got.scale_kind.value}")
    has = "exports" if callable(getattr(subject.backend, "export", None)) else "keeps its source"
    if weight.blocks is BlockOrder.FLAT:
        return f"whole, because flat blocks can't be cut into rows; the backend {has}"
    outputs = weight.out_features
    index = torch.tensor([outputs - 1, 0, outputs // 2, 0])
    rows = layer.module.rows(index, torch.float32).cpu()
    expected = torch.from_numpy(exact_weight(weight))[index].to(torch.float32)
    # One rounding each for code times scale, offset and channel: at most an ulp or two apart where these are there.
    tolerance = 4 * 2.0**-24 * torch.from_numpy(np.abs(exact_weight(weight)).max(axis=1, keepdims=True))[index]
    plain = not weight.features & {Feature.OFFSET, Feature.INPUT_CHANNEL_SCALE, Feature.FLOAT_ZERO_POINT}
    right = torch.equal(rows, expected) if plain else bool(((rows - expected).abs() <= tolerance).all())
    expect(right, "rows of the exported weight differ")
    return f"whole and 4 rows; the backend {has}"


@check("state")
def _check_state(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    bias = torch.linspace(-1, 1, weight.out_features).to(case.dtype)
    layer = subject.layer(weight, bias, dtype=case.dtype, precision=case.precision)
    state = {key: value.clone() for key, value in layer.module.state_dict().items()}
    calls = judged_calls(layer, [draw(case, layer, rows) for rows in case.rows])
    after = layer.module.state_dict()
    expect(list(after) == list(state), f"running changed the keys of the state: {sorted(set(after) ^ set(state))}")
    for key, value in state.items():
        expect(stored_bytes(value) == stored_bytes(after[key]), f"running changed {key!r}")
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = subject.layer(attrs.evolve(case.weight_recipe, seed=977).build(), bias, dtype=case.dtype)
    other.module.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    expect_same_bits(other.module, calls, "the loaded layer")
    expect_same_bits(copy.deepcopy(layer.module), calls, "the copied layer")
    return f"{len(state)} keys"


@check("undeclared")
def _check_undeclared(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    subject.require_declared(subject.request(weight, dtype=case.dtype))
    needed = sorted(weight.features | {Feature.GRADIENTS} & subject.backend.capabilities.features, key=str)
    if not needed:
        raise NotDeclaredError("the weight needs no feature")
    for feature in needed:
        manifest = subject.backend.capabilities
        proxy = Proxy(subject.backend, capabilities=attrs.evolve(manifest, features=manifest.features - {feature}))
        config = subject.config(gradients=feature is Feature.GRADIENTS, compute_dtype=case.dtype)
        session = Session(config, registry=make_registry(proxy))
        served = f"a weight that needs {feature.value!r} was served without its being declared"
        error = raised(BackendUnavailableError, functools.partial(session.linear, weight), served)
        codes = [reason.code for item in error.rejections for reason in item.reasons]
        expect(codes == [ReasonCode.FEATURE], f"{feature.value}: refused for {codes}")
        expect(proxy.checks == 0, f"{feature.value}: the backend was asked")
    return ", ".join(feature.value for feature in needed)


@check("refused")
def _check_refused(case: Case, subject: BackendSubject) -> str:
    """Every request of the table that the manifest does not declare is refused by the core, with reasons, unasked.

    The cases of these requests are counted and not run; this one stands for them.
    """
    kind = case.weight_recipe.format.name
    subject.require_declared(request_of(case, subject.device))
    strange = [other for other in BUILTIN_FORMATS if not subject.backend.capabilities.formats & {other, EVERY_FORMAT}]
    table = [item for item in linear_cases([kind]) if undeclared_reason(item, subject)]
    table += [next(iter(linear_cases([other]))) for other in strange]
    manifest, refused = subject.backend.capabilities, 0
    for request in dict.fromkeys(request_of(item, subject.device) for item in table):
        if request.format.name not in strange and not not_declared(manifest, request):
            continue  # what is lacking is another op, or gradients, which a layer need not ask for
        proxy = Proxy(subject.backend)
        config = subject.config(compute_dtype=request.dtype, activation_precision=request.precision)
        call = functools.partial(select, request, config, registry=make_registry(proxy))
        kinds = (BackendUnavailableError, PolicyConflictError)
        raised(kinds, call, f"a request was served that is not declared: {request}")
        refused += 1
        is_asked = proxy.checks > 0 and bool(manifest.refusals(request))
        expect(not is_asked, f"the backend was asked, although its manifest refuses {request}")
    if not refused:
        raise NotDeclaredError("the manifest declares every request of the table")
    return f"{refused} requests refused"


@check("record")
def _check_record(case: Case, subject: BackendSubject) -> str:
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    segments = layer.diagnostics().segments
    wanted = [0] * len(segments)
    ends = {end for segment in segments for end in (segment.low, segment.high) if end is not None and end <= 4096}  # noqa: PLR2004  # sensible
    for turn, rows in enumerate(sorted({*case.rows, *ends})):
        for _ in range(turn + 1):
            layer(torch.zeros(rows, layer.weight.in_features, dtype=case.dtype, device=layer.device))
        if rows:
            index = next(i for i, s in enumerate(segments) if s.low <= rows and (s.high is None or rows <= s.high))
            wanted[index] += turn + 1
    record = layer.diagnostics()
    expect(list(record.calls) == wanted, f"calls are recorded as {list(record.calls)}, were {wanted}")
    best = segments[max(range(len(wanted)), key=lambda index: (wanted[index], -index))].path.name
    expect(record.path_name == best, f"path {record.path_name!r} is recorded, {best!r} ran most")
    expect(record.prepared_bytes > 0, "no prepared bytes are recorded")
    return ", ".join(f"{segment.path.name}: {calls}" for segment, calls in zip(segments, wanted, strict=True))


_RANGES: tuple[tuple[int, int | None], ...] = ((1, 1), (1, None), (5, 40), (40, 600))
_HIGH_ROWS = 200


@check("ranges")
def _check_ranges(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    calls = 0
    for low, high in _RANGES:
        layer = subject.layer(weight, dtype=case.dtype, precision=case.precision, m=(low, high))
        segments = layer.diagnostics().segments
        range_ = f"for M in {low}…{'∞' if high is None else high}"
        expect((segments[0].low, segments[-1].high) == (low, high), f"{range_}: the record says {segments}")
        ends = {end for segment in segments for end in segment.m if end is not None}
        named = {rows for segment in segments for rows in segment.path.probe_rows}
        inside = {rows for rows in named if low <= rows and (high is None or rows <= high)}
        for rows in sorted({*ends, *inside, high or _HIGH_ROWS}):
            x = draw(case, layer, rows)
            judge_call(layer, x, layer(x))
            calls += 1
        expect(layer.diagnostics().proven, f"{range_}: the paths are not proven")
    return f"{len(_RANGES)} ranges, {calls} calls"
