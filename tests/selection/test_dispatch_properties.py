"""In every mix of backends, history, policies and checks the answer is the brute-force model's, and its record true."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import q4core as q4
from q4_um_managed import q4_placers
from q4core.selection.select import select_backend
from tests.support.events import forget_warnings, heard
from tests.support.fakes import plugin
from tests.support.selection_casts import (
    ATTRIBUTES,
    CASTS,
    CODE,
    MEMORIES,
    REGISTRATION,
    Cast,
    History,
    Memory,
    Provider,
    fact_of,
    mixes,
    players,
    plugins_of,
)
from tests.support.selection_model import (
    Fact,
    Offer,
    State,
    Told,
    Wish,
    answer,
    kernel_reasons,
    reasons_against,
    unmatched,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support import selection_model as model

REQUEST = q4.Request(
    format=q4.BUILTIN_FORMATS["nf4"],
    scale_kind=q4.ScaleKind.PLAIN,
    packing=q4.Packing.HIGH_FIRST,
    block_size=64,
    out_features=24,
    in_features=64,
)


WEIGHT = q4.quantize(torch.randn(24, 64, generator=torch.Generator().manual_seed(4)), q4.BUILTIN_FORMATS["nf4"])


def _request(wish: Wish) -> q4.Request:
    return attrs.evolve(REQUEST, m=(wish.low, wish.high), precision=wish.precision, gradients=wish.gradients)


def _select(drawn: Sequence[Cast], wish: Wish, order: random.Random | None = None) -> q4.Selection | q4.Q4Error:
    """Return what the dispatcher answers; with ``order``, to another order of plugins and of backends."""
    plugins = [pair for cast in drawn for pair in plugins_of(cast)]
    if order is not None:
        order.shuffle(plugins)
    registry = q4.Registry(plugins)
    backends = [*registry.backends().items()]
    if order is not None:
        order.shuffle(backends)
    try:
        return select_backend(
            _request(wish),
            dict(backends),
            compute_path=wish.compute_path,
            override=wish.override,
            invalid=registry.invalid_backends(),
            results=History(drawn),
        )
    except q4.Q4Error as error:
        return error


# -- what is held against the model


def _expect_reasons(facts: Sequence[Fact], result: model.Answer, wish: Wish, rejections: Sequence[Any]) -> None:
    """Every backend that does not serve is reported, with all its reasons and no other."""
    for fact in facts:
        if fact.name == result.winner:
            assert fact.name not in {item.backend for item in rejections}
            continue
        own = [item for item in rejections if item.backend == fact.name]
        reasons = [reason for item in own for reason in item.reasons]
        assert reasons, f"nothing is told of {fact.name}"
        assert unmatched(reasons_against(fact, result, wish), reasons) == ([], []), fact.name
        assert {item.native_state for item in own} == {fact.native_state}
    assert {item.backend for item in rejections} <= {fact.name for fact in facts}


def _expect_error(error: q4.Q4Error, facts: Sequence[Fact], result: model.Answer, wish: Wish) -> None:
    """It is the right one of the three, and complete."""
    assert type(error) is result.error, error
    known = {fact.name for fact in facts}
    if isinstance(error, q4.UnknownBackendError):
        serving = {fact.name for fact in facts if fact.native_state != REGISTRATION}
        assert set(error.available) == serving
        assert error.value == wish.override
        assert error.closest == ("ant" if wish.override == "antt" and "ant" in known else error.closest)
        assert error.closest in {None, *known}
        return
    concerned = [fact for fact in facts if wish.override in {None, fact.name}]
    if isinstance(error, q4.PolicyConflictError):
        assert error.value == wish.override
        for told in reasons_against(concerned[0], result, wish):
            assert all(word in str(error) for word in told.words)
        return
    assert isinstance(error, q4.BackendUnavailableError)
    if facts:
        _expect_reasons(concerned, result, wish, error.rejections)
    else:
        assert [item.backend for item in error.rejections] == ["(none)"]


def _expect_lane(segments: Sequence[Any], result: model.Answer, wish: Wish) -> None:
    """The segments lie side by side over the range asked for, and each M has the model's path."""
    assert (segments[0].low, segments[-1].high) == (wish.low, wish.high)
    for before, after in itertools.pairwise(segments):
        assert after.low == before.high + 1
        assert after.path != before.path
    each = [
        next(item.path for item in segments if item.low <= m and (item.high is None or m <= item.high))
        for m in wish.rows
    ]
    assert each == list(result.lane)


def _is_mere_reference(fact: Fact) -> bool:
    paths = [offer.path for offer in fact.offers]
    return not fact.refusals and all(path.kind is q4.PathKind.REFERENCE for path in paths)


def _expect_fallback(text: str | None, facts: Sequence[Fact], result: model.Answer, wish: Wish) -> None:
    """A fallback, and no other answer, says why no kernel serves: for each that might, the reported reason."""
    assert (text is not None) == result.is_fallback
    if text is None:
        return
    assert "no kernel backend is installed" not in text or all(_is_mere_reference(fact) for fact in facts)
    for fact in facts:
        if _is_mere_reference(fact) or wish.override not in {None, fact.name}:
            continue
        told = list(fact.refusals) if fact.refusals else kernel_reasons(fact, wish)
        if not told:  # it could serve, but another one was asked for
            continue
        assert all(word in text for item in told for word in (fact.name, *item.words))
    assert wish.override is None or wish.override in text


def _cast(name: str, *offered: q4.KernelPath, failed: str = "", **facts: Any) -> Cast:
    states = {failed: State.FAILED}
    return Cast(name=name, offers=tuple(Offer(path, states.get(path.name, State.PROVEN)) for path in offered), **facts)


def _path(name: str, kind: q4.PathKind, tier: int, low: int = 1, high: int | None = None) -> q4.KernelPath:
    return q4.KernelPath(name, (low, high), kind, q4.Precision.W4A32, tier)


KERNEL, DEQUANT, REFERENCE = q4.PathKind.KERNEL, q4.PathKind.DEQUANT, q4.PathKind.REFERENCE
OR_FALLBACK = q4.ComputePath.KERNEL_OR_FALLBACK
TWO_KERNELS = [_path("p0", KERNEL, 40), _path("p1", KERNEL, 20)]
HALVES = [_path("p0", KERNEL, 20, 1, 4), _path("p1", KERNEL, 30, 5)]
TWO_REFERENCES = [_cast(name, _path("p0", REFERENCE, tier)) for name, tier in (("ant", 20), ("bee", 0))]


@settings(max_examples=1000)
@example(mix=([_cast("ant", *TWO_KERNELS, failed="p0")], Wish()), order=random.Random(1))
@example(mix=([_cast("ant", *HALVES), _cast("bee", _path("p0", KERNEL, 20))], Wish()), order=random.Random(2))
@example(mix=(TWO_REFERENCES, Wish(compute_path=OR_FALLBACK, override="bee")), order=random.Random(3))
@given(
    mix=mixes(CASTS),
    order=st.randoms(use_true_random=False),
)
@pytest.mark.filterwarnings("ignore::q4core.Q4PluginWarning")
def test_every_mix_is_answered_as_the_policies_say(mix: tuple[list[Cast], Wish], order: random.Random) -> None:
    """Winner, segments, every reason, fallback, proven and errors are the model's, in any order of registration."""
    drawn, wish = mix
    facts = [fact_of(cast, wish) for cast in drawn]
    result = answer(facts, wish)
    got = _select(drawn, wish)
    if isinstance(got, q4.Q4Error):
        _expect_error(got, facts, result, wish)
    else:
        assert (result.error, got.backend) == (None, result.winner)
        winner = next(fact for fact in facts if fact.name == result.winner)
        _expect_lane(got.segments, result, wish)
        _expect_reasons(facts, result, wish, got.rejections)
        assert unmatched(reasons_against(winner, result, wish), got.disqualified) == ([], [])
        _expect_fallback(got.fallback_reason, facts, result, wish)
        states = {offer.path.name: offer.state for offer in winner.offers}
        assert got.proven == all(states[path.name] is State.PROVEN for path in result.lane)
        assert got.native_state == winner.native_state
        assert (got.compute_path, got.override, got.request) == (wish.compute_path, wish.override, _request(wish))
        if wish.override is not None and not result.is_fallback:
            assert got.backend == wish.override
    again = _select(drawn, wish, order)
    assert str(again) == str(got) if isinstance(got, q4.Q4Error) else again == got


# -- what it found, each as its smallest mix

DENIED = _cast("ant", _path("p0", KERNEL, 20), conduct="old api")


@pytest.mark.filterwarnings("ignore::q4core.Q4PluginWarning")
@pytest.mark.parametrize(
    ("drawn", "word"),
    [
        ([DENIED, _cast("bee", _path("p0", REFERENCE, 0))], "api_version"),
        ([_cast("ant", _path("p0", KERNEL, 20), _path("p1", REFERENCE, 0), failed="p0")], "probe_failed"),
        ([_cast("ant", _path("p0", KERNEL, 20, 1, 4), _path("p1", REFERENCE, 0))], "5…∞"),
    ],
    ids=["refused at registration", "failed beside its reference", "gap beside its reference"],
)
def test_a_fallback_says_why_the_kernels_that_are_there_do_not_serve(drawn: list[Cast], word: str) -> None:
    """Where a kernel is installed, the reason for the fallback is what keeps it from serving."""
    selection = _select(drawn, Wish(compute_path=OR_FALLBACK))
    assert isinstance(selection, q4.Selection)
    assert "no kernel backend is installed" not in (selection.fallback_reason or "")
    assert word in (selection.fallback_reason or "")


@pytest.mark.filterwarnings("ignore::q4core.Q4PluginWarning")
def test_a_fallback_from_a_refused_override_says_why_it_was_refused() -> None:
    """An override that was refused at registration falls back with the reason for which it was refused."""
    drawn = [DENIED, _cast("bee", _path("p0", REFERENCE, 0))]
    selection = _select(drawn, Wish(compute_path=OR_FALLBACK, override="ant"))
    assert isinstance(selection, q4.Selection)
    assert "api_version" in (selection.fallback_reason or "")


@pytest.mark.parametrize(
    ("offered", "policy", "error"),
    [
        ([_path("p0", DEQUANT, 10, 4)], q4.ComputePath.KERNEL_ONLY, q4.PolicyConflictError),
        ([_path("p0", REFERENCE, 0, 4)], OR_FALLBACK, q4.BackendUnavailableError),
        (
            [_path("p0", KERNEL, 20, 1, 4), _path("p1", DEQUANT, 10)],
            q4.ComputePath.KERNEL_ONLY,
            q4.PolicyConflictError,
        ),
    ],
    ids=["only a path of another kind", "a reference with a gap", "a gap that a path of another kind would fill"],
)
def test_an_override_is_a_conflict_where_the_policy_rules_out_its_paths(
    offered: list[q4.KernelPath], policy: q4.ComputePath, error: type[q4.Q4Error]
) -> None:
    """It is a conflict if the policy rules out paths that work, and unavailable if there are other reasons as well."""
    wish = Wish(compute_path=policy, override="ant")
    drawn = [_cast("ant", *offered)]
    assert answer([fact_of(cast, wish) for cast in drawn], wish).error is error
    assert type(_select(drawn, wish)) is error


@pytest.mark.filterwarnings("ignore::q4core.Q4PluginWarning")
def test_a_plugin_that_can_not_make_its_backends_is_listed() -> None:
    """A plugin whose q4_backends raises is among the rejections, so that its kernels are not missed in silence."""

    def q4_backends() -> list[object]:
        raise OSError("libkernels.so can't be loaded")

    registry = q4.Registry([("kernels", plugin(q4_backends=q4_backends)), *plugins_of(TWO_REFERENCES[0])])
    registry.backends()
    assert [item.name for item in registry.invalid_backends()] == ["kernels"]


# -- a session over the same backends: probes that really run, and unified memory

DISABLED, _, REQUIRE = q4.UnifiedMemoryPolicy


def _after_probes(drawn: Sequence[Cast], wish: Wish) -> tuple[list[Fact], model.Answer, bool]:
    """Return what must come of it once each winner was prepared and probed, and whether a probe failed on the way."""
    found: frozenset[tuple[str, str]] = frozenset()
    unable: dict[str, tuple[Told, ...]] = {}
    while True:
        facts = [fact_of(cast, wish, found) for cast in drawn]
        facts = [attrs.evolve(fact, refusals=unable.get(fact.name, fact.refusals)) for fact in facts]
        facts = [attrs.evolve(fact, offers=() if fact.refusals else fact.offers) for fact in facts]
        result = answer(facts, wish)
        cast = next((cast for cast in drawn if cast.name == result.winner), None)
        if cast is not None and cast.conduct == "cannot prepare":
            unable[cast.name] = (Told(CODE.PLUGIN_ERROR, ("prepare raised MemoryError", f"{cast.name} lacks room")),)
            continue
        wrong = frozenset((cast.name, path.name) for path in result.lane if path.name in cast.wrong) if cast else found
        if wrong <= found:
            return facts, result, bool(found)
        found |= wrong


def _expect_memory(record: q4.Diagnostics, memory: Memory) -> None:
    """Each buffer's line is of the policy and of what there is."""
    if memory.policy is DISABLED:
        assert record.memory == ()
        return
    action = "promoted" if memory.can else "left" if memory.is_turned_off else "fallback"
    assert record.memory
    for line in record.memory:
        assert line.startswith(f"{action}: ")
        assert memory.fact in line


def _expect_memory_error(error: q4.Q4Error, memory: Memory) -> None:
    """Required unified memory that can't be had is reported first of all, with the attributes that decided."""
    assert isinstance(error, q4.UnifiedMemoryError)
    assert memory.fact in str(error)
    assert error.attributes
    if memory.provider == "cannot" and not memory.is_turned_off:
        assert error.attributes.items() >= ATTRIBUTES.items()


@attrs.define
class Made:
    """What came of asking a session for a layer, and what was reported meanwhile."""

    layer: q4.Q4Linear | None = None
    error: q4.Q4Error | None = None
    y: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))
    events: list[dict[str, Any]] = attrs.field(factory=list)
    warned: list[type[Warning]] = attrs.field(factory=list)


def _make(drawn: Sequence[Cast], wish: Wish, memory: Memory, x: torch.Tensor) -> Made:
    """Make a layer in a session of its own, and run it."""
    forget_warnings()
    provider = Provider(memory.provider)
    hooks: dict[str, Any] = {"q4_placers": q4_placers}
    if memory.provider != "none":
        hooks["q4_memory_providers"] = lambda: [provider]
    registry = q4.Registry([*(pair for cast in drawn for pair in plugins_of(cast)), ("memory", plugin(**hooks))])
    config = q4.SessionConfig(
        device="cpu",
        backend=wish.override,
        compute_path=wish.compute_path,
        activation_precision=wish.precision,
        gradients=wish.gradients,
        unified_memory=memory.policy,
    )
    made = Made()
    with (
        heard("q4.select") as made.events,
        mock.patch.dict(os.environ, {"Q4_DISABLE_UM": "1"} if memory.is_turned_off else {}),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        try:
            made.layer = q4.Session(config, registry=registry).linear(WEIGHT, m=(wish.low, wish.high))
            made.y = made.layer(x)
        except q4.Q4Error as error:
            made.error = error
    made.warned = [item.category for item in warned]
    return made


@settings(max_examples=150)
@given(mix=mixes(players()), memory=MEMORIES)
@pytest.mark.filterwarnings("ignore::q4core.Q4PluginWarning")
def test_every_mix_of_a_session_is_reported_correctly(mix: tuple[list[Cast], Wish], memory: Memory) -> None:
    """With probes that run and unified memory asked for, a layer's record is the model's, and its numbers are right."""
    drawn, wish = mix
    facts, result, is_probe_failed = _after_probes(drawn, wish)
    x = torch.randn(wish.low, 64, generator=torch.Generator().manual_seed(wish.low))
    made = _make(drawn, wish, memory, x)
    if made.error is not None:
        assert made.events == []
        if memory.policy is REQUIRE and not memory.can:
            _expect_memory_error(made.error, memory)
        else:
            _expect_error(made.error, facts, result, wish)
        return
    assert made.layer is not None
    assert memory.policy is not REQUIRE or memory.can
    record = made.layer.diagnostics()
    assert (result.error, record.backend) == (None, result.winner)
    _expect_record(record, facts, result, wish)
    _expect_memory(record, memory)
    assert [fields["backend"] for fields in made.events] == [record.backend]
    assert made.events[0]["rejections"] == [str(item) for item in record.rejections]
    assert made.events[0]["fallback_reason"] == record.fallback_reason
    assert made.events[0]["proven"]
    assert made.warned.count(q4.Q4FallbackWarning) == result.is_fallback
    assert (q4.Q4ProbeWarning in made.warned) == is_probe_failed
    torch.testing.assert_close(made.y, x @ q4.dequantize(WEIGHT).T)


def _expect_record(record: q4.Diagnostics, facts: Sequence[Fact], result: model.Answer, wish: Wish) -> None:
    """Every field is the model's."""
    winner = next(fact for fact in facts if fact.name == result.winner)
    _expect_lane(record.segments, result, wish)
    _expect_reasons(facts, result, wish, record.rejections)
    assert unmatched(reasons_against(winner, result, wish), record.disqualified) == ([], [])
    _expect_fallback(record.fallback_reason, facts, result, wish)
    assert record.proven
    assert (record.format, record.compute_path) == ("nf4", wish.compute_path)
    assert (record.native_load_state, record.path_name) == (winner.native_state, result.lane[0].name)
