"""What changed between two certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance.tally import BAD

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["compare"]

_BAD = {outcome.value for outcome in BAD}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= _flat(item, f"{name}.{key}" if name else key)
        return found
    return {name: value}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], *sections: str) -> list[dict[str, Any]]:
    old = _flat({name: before[name] for name in sections})
    new = _flat({name: after[name] for name in sections})
    return [
        {"what": name, "before": old.get(name), "after": new.get(name)}
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changed, ready for JSON.

    Returns:
        ``same_verdicts``: whether every case ended alike; ``verdicts``: those that did not, each with ``change`` one of
        ``worse``, ``better``, ``new``, ``gone`` and ``other``; ``paths``: cases that ran on other kernel paths;
        ``facts`` and ``counts``: what else differs.
    """
    old = {item["case"]: item for item in before["results"]}
    new = {item["case"]: item for item in after["results"]}
    verdicts = []
    for case in sorted(old.keys() | new.keys()):
        one, two = _end(old.get(case)), _end(new.get(case))
        if one != two:
            verdicts.append({"case": case, "before": one, "after": two, "change": _direction(one, two)})
    paths = [
        {"case": case, "before": old[case].get("paths", []), "after": new[case].get("paths", [])}
        for case in sorted(old.keys() & new.keys())
        if old[case].get("paths", []) != new[case].get("paths", [])
    ]
    return {
        "same_verdicts": not verdicts,
        "standing": {"before": before["standing"], "after": after["standing"]},
        "verdicts": verdicts,
        "paths": paths,
        "facts": _changes(before, after, "subject", "versions", "source", "device", "manifest", "overrides"),
        "counts": _changes(before, after, "counts"),
    }


def _end(result: Mapping[str, Any] | None) -> str | None:
    if result is None:
        return None
    outcome: str = result["outcome"]
    return f"{outcome} by fallback" if result.get("fallback") else outcome


def _direction(before: str | None, after: str | None) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    was, now = before.partition(" ")[0], after.partition(" ")[0]
    if (now in _BAD) != (was in _BAD):
        return "worse" if now in _BAD else "better"
    if "pass" in {was, now} and was != now:
        return "better" if now == "pass" else "worse"
    return "other"
