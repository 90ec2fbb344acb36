"""What changed between two certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance.standing import ORDER
from q4_conformance.tally import BAD
from q4core import PathKind, Standing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["compare"]

_BAD = {outcome.value for outcome in BAD}
_WORSE = {"worse", "gone"}
_LIMITS = ("case_seconds", "memory_bytes")
_DECLARED = ("overrides", "known_failures")
_WEAKNESS = [item.value for item in Standing]


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
        ``worse``, ``better``, ``new``, ``gone`` and ``other``; ``is_weaker``: whether the second certifies less than
        the first, for one of these verdicts or for what stands in ``weaker``: the standing, the subject, formats and
        kernel paths, bounds that the author widened, and limits; ``paths``: cases that ran on other kernel paths;
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
    weaker = [*_weaker(before, after), *_weaker_paths(before, after), *_weaker_bounds(before, after)]
    return {
        "same_verdicts": not verdicts,
        "is_weaker": bool(weaker) or any(item["change"] in _WORSE for item in verdicts),
        "weaker": weaker,
        "standing": {"before": before["standing"], "after": after["standing"]},
        "verdicts": verdicts,
        "paths": paths,
        "facts": _changes(before, after, "subject", "versions", "source", "device", "manifest", *_DECLARED),
        "counts": _changes(before, after, "counts"),
    }


def _change(what: str, before: object, after: object) -> dict[str, Any]:
    return {"what": what, "before": before, "after": after}


def _weaker(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the second document as a whole says less of."""
    if ORDER.index(after["standing"]) < ORDER.index(before["standing"]):
        yield _change("standing", before["standing"], after["standing"])
    if after["device"]["interpreted"] and not before["device"]["interpreted"]:
        yield _change("device.interpreted", before=False, after=True)
    for name in ("name", "profile", "device"):
        if after["subject"][name] != before["subject"][name]:
            yield _change(f"subject.{name}", before["subject"][name], after["subject"][name])
    if not set(before["subject"]["formats"]) <= set(after["subject"]["formats"]):
        yield _change("subject.formats", before["subject"]["formats"], after["subject"]["formats"])
    for name in _LIMITS:
        if after["run"][name] > before["run"][name]:
            yield _change(f"run.{name}", before["run"][name], after["run"][name])


def _weaker_paths(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the kernel paths that the second document no longer certifies."""
    new = {(row["format"], row["path"]): row for row in after["paths"]}
    # Another processor has other paths, of which as much may be known or less.
    is_same_machine = all(
        before["device"].get(name) == after["device"].get(name) for name in ("cpu_features", "gpu", "machine")
    )
    for row in before["paths"]:
        name = f"path {row['path']} of {row['format']}"
        now = new.get((row["format"], row["path"]))
        if now is None:
            if row["passed"] and is_same_machine:
                yield _change(name, "passed", "did not run")
            continue
        if row["passed"] and not now["passed"]:
            yield _change(name, "passed", "did not pass")
        if row["kind"] == PathKind.KERNEL.value != now["kind"]:
            yield _change(f"{name}, kind", row["kind"], now["kind"])
        has_fallen = _weakness(now["standing"]) > _weakness(row["standing"])
        if has_fallen and (is_same_machine or now["standing"] == Standing.INTERPRETED.value):
            yield _change(f"{name}, standing", row["standing"], now["standing"])


def _weakness(standing: str) -> int:
    return _WEAKNESS.index(standing) if standing in _WEAKNESS else len(_WEAKNESS)


def _weaker_bounds(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the bounds that the second document widens further, and the failures that it newly expects."""
    old = [item for name in _DECLARED for item in before[name]]
    for item in (item for name in _DECLARED for item in after[name]):
        covering = [one for one in old if item["case"].startswith(one["case"])]
        was = max((one["bound"] for one in covering), default=1.0)
        if item["bound"] > was:
            yield _change(f"bound of {item['case']}…", f"× {was:g}", f"× {item['bound']:g}: {item['reason']}")
        elif not any(one["is_known_failure"] for one in covering) and item["is_known_failure"]:
            yield _change(f"{item['case']}…", "not declared", f"known to fail: {item['reason']}")


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
    if "pass" in {was, now}:
        better = now == "pass" if was != now else "fallback" in before
        return "better" if better else "worse"
    return "other"
