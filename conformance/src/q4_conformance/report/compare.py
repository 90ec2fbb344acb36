"""What changed between two certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance.report.status import ORDER
from q4_conformance.report.tally import BAD
from q4core import PathKind, Standing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["compare"]

_BAD = {outcome.value for outcome in BAD}
_WORSE = {"worse", "gone"}
_LIMITS = ("case_seconds", "memory_bytes")
_RUN = ("environment", "partial", "only", "processes", *_LIMITS)
"""What is told of a run; its command says no more, but for where the files went."""
_DECLARED = ("overrides", "known_failures")
_FACTS = (
    *("subject", "versions", "source", "device", "manifest", "run", *_DECLARED),
    *("not_tested", "missing", "broken_plugins"),
)
_PASSED = "passed"
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
        ``facts`` and ``counts``: what else differs, the environment of the run, what was not tested, cases without a
        result, broken neighbours and the paths of another machine among it.
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
    kernels = list(_changed_paths(before, after))
    lesser = [change for is_weaker, change in kernels if is_weaker]
    weaker = [*_weaker(before, after), *lesser, *_weaker_bounds(before, after)]
    facts = _changes(_facts(before), _facts(after), *_FACTS)
    facts += [change for is_weaker, change in kernels if not is_weaker]
    return {
        "same_verdicts": not verdicts,
        "is_weaker": bool(weaker) or any(item["change"] in _WORSE for item in verdicts),
        "weaker": weaker,
        "standing": {"before": before["standing"], "after": after["standing"]},
        "verdicts": verdicts,
        "paths": paths,
        "facts": [item for item in facts if item not in weaker],
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


def _facts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is compared field by field, with lists of which each row counts as a table of them."""
    run = {name: document["run"][name] for name in _RUN}
    left_out = {f"{row['what']}: {row['why']}": f"{row['cases']} cases" for row in document["not_tested"]}
    return {**document, "run": run, "not_tested": left_out, "missing": dict.fromkeys(document["missing"], "no result")}


def _changed_paths(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield what changed of the kernel paths, each with whether the second document certifies less by it."""
    old, new = ({(row["format"], row["path"]): row for row in item["paths"]} for item in (before, after))
    # Another processor has other paths, of which as much may be known or less.
    is_same_machine = all(
        before["device"].get(name) == after["device"].get(name) for name in ("cpu_features", "gpu", "machine")
    )
    for key in dict.fromkeys((*old, *new)):
        name = f"path {key[1]} of {key[0]}"
        was, now = _state(old.get(key)), _state(new.get(key))
        if was != now:
            is_gone = key not in new
            yield was == _PASSED and (is_same_machine or not is_gone), _change(name, was, now)
        if key not in old or key not in new:
            continue
        row, other = old[key], new[key]
        if row["kind"] != other["kind"]:
            yield row["kind"] == PathKind.KERNEL.value, _change(f"{name}, kind", row["kind"], other["kind"])
        if row["standing"] != other["standing"]:
            has_fallen = _weakness(other["standing"]) > _weakness(row["standing"])
            is_less = has_fallen and (is_same_machine or other["standing"] == Standing.INTERPRETED.value)
            yield is_less, _change(f"{name}, standing", row["standing"], other["standing"])


def _state(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "did not run"
    return _PASSED if row["passed"] else "did not pass"


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
