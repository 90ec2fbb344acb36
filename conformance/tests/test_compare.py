"""Comparing two certificates tells every change, and whether the second certifies less."""

from __future__ import annotations

from typing import Any

import attrs
import documents
import pytest

from q4_conformance import Outcome
from q4_conformance.compare import compare
from q4_conformance.process import Limits
from q4_conformance.query import Query


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
    assert compare(other, elsewhere)["weaker"] == []
    worse = documents.document(documents.bad(paths=["other|kernel|w4a32|ran"]))
    assert "path other/w4a32 of q4_0" in [item["what"] for item in compare(other, worse)["weaker"]]


def test_a_pass_by_fallback_is_less_than_a_pass() -> None:
    """A case that the reference came to compute is told as worse."""
    fallen = documents.document(documents.bad(Outcome.PASS, is_fallback=True))
    good = documents.document()
    assert [item["change"] for item in compare(good, fallen)["verdicts"]] == ["worse"]
    assert [item["change"] for item in compare(fallen, good)["verdicts"]] == ["better"]
    assert compare(good, fallen)["is_weaker"]
