"""Comparing two certificates tells every change, and whether the second certifies less."""

from __future__ import annotations

from typing import Any

import attrs
import documents
import pytest

from q4_conformance import Outcome
from q4_conformance.execution.process import Limits
from q4_conformance.execution.query import Query
from q4_conformance.report.compare import compare


def test_comparing_tells_what_changed() -> None:
    """Verdicts, facts and counts that differ are told, each verdict with its direction; equal ones are not."""
    good, bad = documents.document(), documents.document(documents.bad())
    same = compare(good, documents.document(seconds=50.0))
    assert same["same_verdicts"]
    assert same["facts"] == same["counts"] == same["paths"] == []
    worse = compare(good, bad)
    assert not worse["same_verdicts"]
    assert [(item["before"], item["after"], item["change"]) for item in worse["verdicts"]] == [
        ("pass", "fail", "worse")
    ]
    assert {item["what"] for item in worse["counts"]} == {"counts.pass", "counts.fail"}
    assert compare(bad, good)["verdicts"][0]["change"] == "better"
    newer = documents.document(facts={**documents.run().facts, "versions": {"q4core": "2", "torch": "2"}})
    assert compare(good, newer)["facts"] == [{"what": "versions.q4core", "before": "1", "after": "2"}]
    fewer = {**good, "results": good["results"][1:]}
    assert [item["change"] for item in compare(good, fewer)["verdicts"]] == ["gone"]
    assert [item["change"] for item in compare(fewer, good)["verdicts"]] == ["new"]


ON_CUDA = attrs.evolve(documents.TARGET, device="cuda")


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (documents.document(), documents.document(standing="interpreted"), "standing"),
        (documents.document(), documents.document(query=Query(name="made-up", only=("TC-09",))), "standing"),
        (documents.document(), documents.widened(), "bound of TC-09/bias…"),
        (documents.widened(2.0), documents.widened(8.0), "bound of TC-09/bias…"),
        (documents.document(), documents.widened(is_known_failure=True), "bound of TC-09/bias…"),
        (
            documents.document(),
            documents.document(target=attrs.evolve(documents.TARGET, device="cuda")),
            "subject.device",
        ),
        (
            documents.document(),
            documents.document(query=Query(name="made-up", limits=Limits(case_seconds=600.0))),
            "run.case_seconds",
        ),
    ],
    ids=["interpreted", "partial", "bound", "wider bound", "known failure", "device", "limit"],
)
def test_comparing_tells_what_certifies_less(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    """A standing that fell, a bound that was widened and the like make the second weaker; the way back does not."""
    told = compare(before, after)
    assert told["is_weaker"]
    assert what in [item["what"] for item in told["weaker"]]
    if what != "subject.device":
        assert not compare(after, before)["weaker"]


def test_comparing_tells_of_paths_that_are_gone() -> None:
    """A path that no longer ran on the same machine, or no longer passed, is less; on another machine it is not."""
    good = documents.document()
    other = documents.document(documents.bad(Outcome.PASS, paths=["other|kernel|w4a32|ran"]))
    assert [item["what"] for item in compare(other, good)["weaker"]] == ["path other/w4a32 of q4_0"]
    elsewhere = {**good, "device": {**good["device"], "cpu_features": ["less"]}}
    told = compare(other, elsewhere)
    assert told["weaker"] == []
    gone = {"what": "path other/w4a32 of q4_0", "before": "passed", "after": "did not run"}
    assert gone in told["facts"]
    back = {"what": gone["what"], "before": gone["after"], "after": gone["before"]}
    assert back in compare(elsewhere, other)["facts"]
    assert gone not in compare(other, good)["facts"]  # it is told once
    worse = documents.document(documents.bad(paths=["other|kernel|w4a32|ran"]))
    assert "path other/w4a32 of q4_0" in [item["what"] for item in compare(other, worse)["weaker"]]


def test_a_pass_by_fallback_is_less_than_a_pass() -> None:
    """A case that the reference came to compute is told as worse."""
    fallen = documents.document(documents.bad(Outcome.PASS, is_fallback=True))
    good = documents.document()
    assert [item["change"] for item in compare(good, fallen)["verdicts"]] == ["worse"]
    assert [item["change"] for item in compare(fallen, good)["verdicts"]] == ["better"]
    assert compare(good, fallen)["is_weaker"]


_ROW = {"what": "format nf4", "why": "not asked for", "cases": 0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"run": {"environment": {"Q4_MAX_THREADS": "1"}}},
            {"what": "run.environment.Q4_MAX_THREADS", "before": None, "after": "1"},
        ),
        ({"run": {"processes": 7}}, {"what": "run.processes", "before": 2, "after": 7}),
        (
            {"not_tested": [_ROW]},
            {"what": "not_tested.format nf4: not asked for", "before": None, "after": "0 cases"},
        ),
        (
            {"missing": ["TC-09/x"]},
            {"what": "missing.TC-09/x", "before": None, "after": "no result"},
        ),
        (
            {"broken_plugins": {"neighbour": ["ImportError: no"]}},
            {"what": "broken_plugins.neighbour", "before": None, "after": ["ImportError: no"]},
        ),
    ],
    ids=["environment", "processes", "not tested", "missing", "broken plugins"],
)
def test_what_a_run_was_made_in_and_left_out_is_compared(change: dict[str, Any], expected: dict[str, Any]) -> None:
    """Variables of the environment, what was not tested or has no result, and broken neighbours are told, both ways."""
    good = documents.document()
    good["run"] |= {"environment": {}, "processes": 2}
    good |= {"not_tested": [], "broken_plugins": {}}
    other = {**good, **{name: {**good[name], **item} if name == "run" else item for name, item in change.items()}}
    told = compare(good, other)
    assert told["facts"] == [expected]
    assert not told["is_weaker"]
    assert compare(other, good)["facts"] == [expected | {"before": expected["after"], "after": expected["before"]}]
    assert compare(other, other)["facts"] == []


def test_limits_that_were_lowered_are_told() -> None:
    """A shorter limit makes no document weaker, and is told nevertheless."""
    long = documents.document(query=Query(name="made-up", limits=Limits(case_seconds=600.0)))
    told = compare(long, documents.document())
    assert told["weaker"] == []
    assert [item["what"] for item in told["facts"]] == ["run.case_seconds"]
