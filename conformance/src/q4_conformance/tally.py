"""Results counted: by contract, part, format and path; the matrix that certificates and pages show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance.outcome import Outcome
from q4core import BUILTIN_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_conformance.outcome import CaseResult

__all__ = [
    "BAD",
    "NO_FORMAT",
    "NO_PATH",
    "by_part",
    "by_path",
    "count",
    "format_of",
    "format_order",
    "matrix_of",
    "merged",
    "part_of",
    "path_label",
    "paths_of",
    "verdict_of",
]

BAD = (Outcome.FAIL, Outcome.CRASH, Outcome.TIMEOUT)
NO_FORMAT = "any"
"""Format of a case that has no weight."""
NO_PATH = "-"
"""Path of a case that ran no kernel path of its own, such as a refusal."""
_LEAST_WORDS = 3
_FALLBACK = "passed_by_fallback"


def part_of(case: str) -> str:
    """Return contract and part of a case's id."""
    return "/".join(case.split("/")[:2])


def format_of(case: str) -> str:
    """Return the format of a case's id."""
    words = case.split("/")
    return words[2].partition("-")[0] if len(words) >= _LEAST_WORDS else NO_FORMAT


def part_order(part: str) -> tuple[bool, str]:
    """Return the sort key of a part: the contract's own cases before the extended ones."""
    return (not part.startswith("TC"), part)


def format_order(name: str) -> tuple[int, str]:
    """Return the sort key of a format: the core's order, then others."""
    order = [*BUILTIN_FORMATS, NO_FORMAT]
    return (order.index(name) if name in order else len(order), name)


def path_label(path: str) -> str:
    """Return ``name/precision`` of a path that a result names as ``name|kind|precision|standing``."""
    name, _, precision, _ = path.split("|")
    return f"{name}/{precision}"


def count(results: Iterable[CaseResult]) -> dict[str, int]:
    """Return how many results there are of each outcome, how many at all, and how many passes are the reference's."""
    counts = {"cases": 0, **{outcome.value: 0 for outcome in Outcome}, _FALLBACK: 0}
    for result in results:
        counts["cases"] += 1
        counts[result.outcome.value] += 1
        counts[_FALLBACK] += result.outcome is Outcome.PASS and result.is_fallback
    return counts


def verdict_of(counts: Mapping[str, int]) -> str:
    """Return one word for a cell: the worst that happened, else ``pass``, else why nothing passed."""
    order = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.FAIL, Outcome.PASS, Outcome.NOT_TESTABLE, Outcome.NOT_DECLARED)
    return next((outcome.value for outcome in order if counts.get(outcome.value)), "empty")


def matrix_of(results: Iterable[CaseResult]) -> list[dict[str, Any]]:
    """Return one row for each part × format × path; a case that ran on several paths counts for each."""
    cells: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        for path in [path_label(path) for path in result.paths] or [NO_PATH]:
            cells.setdefault((part_of(result.case), format_of(result.case), path), []).append(result)
    rows = []
    for (part, kind, path), members in sorted(cells.items(), key=lambda item: (part_order(item[0][0]), item[0])):
        counts = count(members)
        row = {"part": part, "format": kind, "path": path, "verdict": verdict_of(counts)}
        rows.append(row | {name: number for name, number in counts.items() if number})
    return rows


def paths_of(results: Iterable[CaseResult]) -> list[dict[str, Any]]:
    """Return every (format, path) that ran, with its counts and whether all cases that ran it passed."""
    seen: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        for path in result.paths:
            seen.setdefault((format_of(result.case), path), []).append(result)
    rows = []
    for (kind, path), members in sorted(seen.items(), key=lambda item: (format_order(item[0][0]), item[0])):
        _, what, _, standing = path.split("|")
        counts = count(members)
        passed = counts["pass"] > 0 and not any(counts[outcome.value] for outcome in BAD)
        rows.append(
            {"format": kind, "path": path_label(path), "kind": what, "standing": standing, "passed": passed} | counts
        )
    return rows


def merged(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the counts of several rows of a matrix added up."""
    total = count(())
    for row in rows:
        for name in total:
            total[name] += row.get(name, 0)
    return total


def by_part(document: Mapping[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Return part → format → counts of a document's results."""
    cells: dict[str, dict[str, dict[str, int]]] = {}
    for result in document["results"]:
        row = cells.setdefault(part_of(result["case"]), {})
        counts = row.setdefault(format_of(result["case"]), count(()))
        counts["cases"] += 1
        counts[result["outcome"]] += 1
        counts[_FALLBACK] += bool(result.get("fallback"))
    return dict(sorted(cells.items(), key=lambda item: part_order(item[0])))


def by_path(document: Mapping[str, Any]) -> tuple[list[str], list[tuple[Mapping[str, Any], list[dict[str, int]]]]]:
    """Return the contract cases that ran on kernel paths, and each path with its counts for each of them."""
    ran = [row for row in document["matrix"] if row["path"] != NO_PATH]
    contracts = sorted({row["part"].partition("/")[0] for row in ran}, key=part_order)
    rows = []
    for path in document["paths"]:
        here = [row for row in ran if row["path"] == path["path"] and row["format"] == path["format"]]
        cells = [merged(row for row in here if row["part"].startswith(f"{name}/")) for name in contracts]
        rows.append((path, cells))
    return contracts, rows
