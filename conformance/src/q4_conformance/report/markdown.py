"""A document as Markdown, for README files and reviews."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_conformance.outcome import BAD_VALUES, Outcome
from q4_conformance.report.status import SEALS, counted, facts_of, not_meant, path_verdict, title_of
from q4_conformance.report.tally import NAMES, SIGNS, by_part, by_path, count, verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def _escape(value: object) -> str:
    text = str(value).replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(map(_escape, row))} |" for row in rows), ""]


def _cell(counts: Mapping[str, int]) -> str:
    verdict = verdict_of(counts)
    if verdict == "empty":
        return ""
    number, cases = counts[verdict], counts["cases"]
    return f"{SIGNS[verdict]} {number}" if number == cases else f"{SIGNS[verdict]} {number}/{cases}"


def to_markdown(document: Mapping[str, Any]) -> str:
    """Return the page."""
    counts = document["counts"]
    seal = SEALS[document["standing"]]
    others = [item.value for item in Outcome if item is not Outcome.PASS]
    columns = ["cases", "pass", "passed_by_fallback", *others]
    head = ["cases", "passed", "of them by fallback", *(NAMES[name] for name in others)]
    lines = [
        f"# {title_of(document)} on {document['subject']['device']}: {seal.sign} {seal.word}",
        "",
        f"{document['sentence'].capitalize()} ({seal.note}). {document['statement']}",
        "",
        f"{counted(document)}. {not_meant(document)}".strip(),
        "",
        *_table(head, [[counts[name] for name in columns]]),
        *(f"- not declared: {row['what']}, {row['cases']:,} cases" for row in document["not_declared"]),
        "",
    ]
    wrong = [item for item in document["results"] if item["outcome"] in BAD_VALUES]
    if wrong:
        lines += ["## What went wrong", ""]
        for item in wrong:
            lines.append(f"- {NAMES[item['outcome']]}: `{item['case']}`: {_escape(item['message'])}")
            lines += [f"  - `{_escape(line)}`" for line in item.get("reproducer", "").splitlines()]
        lines.append("")
    legend = ", ".join(f"{sign} {NAMES[name]}" for name, sign in SIGNS.items() if sign)
    lines += ["## Cases by format", "", f"Signs: {legend}.", "", *_matrix(document)]
    if document["paths"]:
        lines += ["## Kernel paths that ran", "", *_paths(document)]
    lines += ["## What was not tested", "", *_not_tested(document)]
    lines += ["## Facts", "", *_table(["what", "value"], facts_of(document))]
    return "\n".join(lines)


def _matrix(document: Mapping[str, Any]) -> list[str]:
    formats = [row["format"] for row in document["formats"]]
    nothing = count(())
    rows = [
        [part, document["parts"].get(part, ""), *(_cell(cells.get(kind, nothing)) for kind in formats)]
        for part, cells in by_part(document).items()
    ]
    return _table(["case", "what must hold", *formats], rows)


def _paths(document: Mapping[str, Any]) -> list[str]:
    contracts, paths = by_path(document)
    rows = [
        [path["format"], f"`{path['path']}`", path["kind"], path["standing"], path_verdict(path), *map(_cell, cells)]
        for path, cells in paths
    ]
    return _table(["format", "path", "kind", "standing", "verdict", *contracts], rows)


def _not_tested(document: Mapping[str, Any]) -> list[str]:
    rows: Any = [[row["what"], row["why"], row["cases"] or ""] for row in document["not_tested"]]
    return _table(["what", "why", "cases"], rows) if rows else ["Nothing.", ""]
