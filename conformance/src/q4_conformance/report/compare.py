"""Which cases ended differently in two certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance.outcome import BAD
from q4_conformance.report.status import ORDER

if TYPE_CHECKING:
    from collections.abc import Mapping

_BAD = {outcome.value for outcome in BAD}


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changed, ready for JSON.

    Returns:
        ``same_verdicts``: whether every case ended alike, as the two hashes say; ``verdicts``: those that did not, each
        with ``change`` one of ``worse``, ``better``, ``new``, ``gone`` and ``other``; ``standing``: before and after;
        ``is_weaker``: whether the second certifies less than the first.
    """
    old, new = ({item["case"]: item["outcome"] for item in document["results"]} for document in (before, after))
    verdicts = [
        {
            "case": case,
            "before": old.get(case),
            "after": new.get(case),
            "change": _direction(old.get(case), new.get(case)),
        }
        for case in sorted(old.keys() | new.keys())
        if old.get(case) != new.get(case)
    ]
    standing = {"before": before["standing"], "after": after["standing"]}
    has_fallen = ORDER.index(after["standing"]) < ORDER.index(before["standing"])
    return {
        "same_verdicts": before["verdict_hash"] == after["verdict_hash"],
        "is_weaker": has_fallen or any(item["change"] in {"worse", "gone"} for item in verdicts),
        "standing": standing,
        "verdicts": verdicts,
    }


def _direction(before: str | None, after: str | None) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    if (after in _BAD) != (before in _BAD):
        return "worse" if after in _BAD else "better"
    if "pass" in {before, after}:
        return "better" if after == "pass" else "worse"
    return "other"
