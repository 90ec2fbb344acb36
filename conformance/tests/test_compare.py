"""Comparing two certificates tells every case that ended differently, and whether the second certifies less."""

from __future__ import annotations

import documents

from q4_conformance.execution.query import Query
from q4_conformance.report.certificate import verdict_hash
from q4_conformance.report.verify import compare


def test_comparing_tells_what_changed() -> None:
    """Cases that ended differently are told, each with its direction; where none did, nothing is."""
    good, bad = documents.document(), documents.document(documents.bad())
    same = compare(good, documents.document(seconds=50.0))
    assert (same["same_verdicts"], same["verdicts"], same["is_weaker"]) == (True, [], False)
    worse = compare(good, bad)
    assert (worse["same_verdicts"], worse["is_weaker"]) == (False, True)
    assert [(item["before"], item["after"], item["change"]) for item in worse["verdicts"]] == [
        ("pass", "fail", "worse")
    ]
    better = compare(bad, good)
    assert (better["verdicts"][0]["change"], better["is_weaker"]) == ("better", False)
    fewer = {**good, "results": good["results"][1:]}
    fewer["verdict_hash"] = verdict_hash(fewer)
    assert [item["change"] for item in compare(good, fewer)["verdicts"]] == ["gone"]
    assert [item["change"] for item in compare(fewer, good)["verdicts"]] == ["new"]


def test_a_lesser_standing_is_weaker() -> None:
    """An interpreter and a partial run certify less, though every case ended alike."""
    good = documents.document()
    for other in (documents.document(standing="interpreted"), documents.document(query=Query(name="x", only=("TC",)))):
        told = compare(good, other)
        assert (told["same_verdicts"], told["is_weaker"]) == (True, True)
        assert not compare(other, good)["is_weaker"]
