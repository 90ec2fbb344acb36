"""Results counted: by contract, part, format and path; the matrix that certificates and pages show.

Results are those of a document, so that its reader counts as its writer does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance.contract.case import part_order
from q4_conformance.outcome import BAD, BAD_VALUES, Outcome, grouped
from q4_conformance.subjects.backend import SERVED_BY
from q4core import BUILTIN_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PASS = Outcome.PASS.value
SIGNS = {"pass": "✓", "fail": "✗", "crash": "✸", "timeout": "◷", "not_declared": "–", "not_testable": "○", "empty": ""}
NAMES = {
    "pass": "passed",
    "fail": "failed",
    "crash": "crashed",
    "timeout": "timed out",
    "not_declared": "not declared",
    "not_testable": "not testable here",
    "passed_by_fallback": "passed by fallback",
    "cases": "cases",
}
NO_FORMAT = "any"
"""Format of a case that has no weight."""
_LEAST_WORDS = 3
_FALLBACK = "passed_by_fallback"
_SERVED_BY = {asked.value: {item.value for item in precisions} for asked, precisions in SERVED_BY.items()}
"""Last word of a case's id → the precisions of the paths that serve what it asks for."""


def undeclared_cases(document: Mapping[str, Any]) -> int:
    """Return of how many cases a document says that they did not run, because the manifest does not declare them."""
    return sum(row["cases"] for row in document["not_declared"])


def part_of(case: str) -> str:
    """Return contract and part of a case's id."""
    return "/".join(case.split("/")[:2])


def format_of(case: str) -> str:
    """Return the format of a case's id."""
    words = case.split("/")
    return words[2].partition("-")[0] if len(words) >= _LEAST_WORDS else NO_FORMAT


def format_order(name: str) -> tuple[int, str]:
    """Return the sort key of a format: the core's order, then others."""
    order = [*BUILTIN_FORMATS, NO_FORMAT]
    return (order.index(name) if name in order else len(order), name)


def path_label(path: str) -> str:
    """Return ``name/precision`` of a path that a result names as ``name|kind|precision|standing``."""
    name, _, precision, _ = path.rsplit("|", 3)
    return f"{name}/{precision}"


def count(results: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many results there are of each outcome, how many at all, and how many passes are the reference's."""
    counts = {"cases": 0, **{outcome.value: 0 for outcome in Outcome}, _FALLBACK: 0}
    for result in results:
        counts["cases"] += 1
        counts[result["outcome"]] += 1
        counts[_FALLBACK] += result["outcome"] == _PASS and result.get("fallback", False)
    return counts


def verdict_of(counts: Mapping[str, int]) -> str:
    """Return one word for a cell: the worst that happened, else ``pass``, else why nothing passed."""
    order = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.FAIL, Outcome.PASS, Outcome.NOT_TESTABLE, Outcome.NOT_DECLARED)
    return next((outcome.value for outcome in order if counts.get(outcome.value)), "empty")


def formats_of(results: Iterable[Mapping[str, Any]], missing: Iterable[str]) -> list[dict[str, Any]]:
    """Return the counts of every format, and whether all that was due of it passed."""
    groups = grouped(results, lambda result: format_of(result["case"]))
    lacking = {format_of(case) for case in missing}
    rows = []
    for name in sorted(groups, key=format_order):
        counts = count(groups[name])
        rows.append({"format": name, "passed": _all_passed(counts) and name not in lacking} | counts)
    return rows


def paths_of(
    results: Iterable[Mapping[str, Any]], missing: Iterable[str], facts: Mapping[tuple[str, str], tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return every (format, path) that ran, with kind, standing, counts, and whether all cases that concern it passed.

    A case that ended without a path, such as a crash, counts against every path that it could have concerned.
    """
    known = list(results)
    lacking = {format_of(case) for case in missing}
    rows = []
    for kind, path in sorted(facts, key=lambda item: (format_order(item[0]), item)):
        counts = count(_concerned(known, kind, path))
        passed = _all_passed(counts) and not lacking & {kind, NO_FORMAT}
        what, standing = facts[kind, path]
        rows.append({"format": kind, "path": path, "kind": what, "standing": standing, "passed": passed} | counts)
    return rows


def _all_passed(counts: Mapping[str, int]) -> bool:
    """Say whether something passed, and nothing that was due ended otherwise."""
    return counts[_PASS] > 0 and not any(counts[outcome.value] for outcome in (*BAD, Outcome.NOT_TESTABLE))


def _concerned(results: Iterable[Mapping[str, Any]], kind: str, path: str) -> list[Mapping[str, Any]]:
    """Return the results of a format that came to a path, or ended badly on an unknown path."""
    return [
        result
        for result in results
        if (format_of(result["case"]) == kind and path in result.get("paths", ())) or _may_concern(result, kind, path)
    ]


def _may_concern(result: Mapping[str, Any], kind: str, path: str) -> bool:
    """Return whether a case that ended badly, on an unknown path, may have been on this one."""
    if result.get("paths") or format_of(result["case"]) not in {kind, NO_FORMAT}:
        return False
    if result["outcome"] == Outcome.NOT_TESTABLE.value:
        # Nothing ran: what was missing is what the activations asked for need.
        wanted = _SERVED_BY.get(result["case"].rpartition("/")[2])
        return wanted is None or path.rpartition("/")[2] in wanted
    return result["outcome"] in BAD_VALUES


def by_part(document: Mapping[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Return part → format → counts of a document's results."""
    parts = grouped(document["results"], lambda result: part_of(result["case"]))
    return {
        part: {kind: count(cell) for kind, cell in grouped(parts[part], lambda item: format_of(item["case"])).items()}
        for part in sorted(parts, key=part_order)
    }


def by_path(document: Mapping[str, Any]) -> tuple[list[str], list[tuple[Mapping[str, Any], list[dict[str, int]]]]]:
    """Return the contract cases that concern kernel paths, and each path with its counts for each of them."""
    rows = []
    for path in document["paths"]:
        concerned = _concerned(document["results"], path["format"], path["path"])
        rows.append((path, grouped(concerned, lambda result: result["case"].partition("/")[0])))
    contracts = sorted(set().union(*(cells for _, cells in rows)), key=part_order)
    return contracts, [(path, [count(cells.get(name, ())) for name in contracts]) for path, cells in rows]
