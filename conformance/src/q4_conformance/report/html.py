"""A document as one HTML page that needs nothing but itself: no scripts, no fonts, no pictures from elsewhere.

Every colour stands beside a sign and a word, so that the page can be read without colours, printed, or read aloud.
"""

from __future__ import annotations

import html
import importlib.resources
from typing import TYPE_CHECKING, Any

from q4_conformance.outcome import BAD_VALUES, Outcome
from q4_conformance.report.status import (
    counted,
    facts_of,
    not_meant,
    path_verdict,
    required_of,
    said_of,
    seal_of,
    subject_of,
    title_of,
)
from q4_conformance.report.tally import by_part, by_path, count, verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
_TILES = {"not_declared": "not declared, so not required"}
"""What a tile says where the name alone leaves a question."""
_OUTCOMES = tuple(outcome.value for outcome in Outcome)
_MOST_FINDINGS = 60
_FEW = 5
"""Up to so many formats stand close to the text, which then has the width that is left."""


def _escape(value: object) -> str:
    text = " ".join(str(value).splitlines()).expandtabs(1)
    return html.escape("".join(letter if letter.isprintable() else "?" for letter in text))


def _cell(counts: Mapping[str, int]) -> str:
    verdict = verdict_of(counts)
    if verdict == "empty":
        return '<td><span class="hidden">no case</span></td>'
    number, cases = counts[verdict], counts["cases"]
    text = ", ".join(f"{counts[name]} {NAMES[name]}" for name in _OUTCOMES if counts[name])
    if counts["passed_by_fallback"]:
        text += f", {counts['passed_by_fallback']} of them by fallback"
    share = f"{number}" if number == cases else f"{number}<small>/{cases}</small>"
    return (
        f'<td><span class="cell {verdict}" title="{_escape(text)}"><span aria-hidden="true">{SIGNS[verdict]} {share}'
        f'</span><span class="hidden">{_escape(text)}</span></span></td>'
    )


def _table(head: Sequence[str], rows: Iterable[str], *, label: str, kind: str = "") -> str:
    cells = "".join(f'<th scope="col">{item}</th>' for item in head)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_escape(label)}">'
        f'<table class="grid {kind}"><thead><tr>'
        f"{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _matrix(document: Mapping[str, Any]) -> str:
    formats = [row["format"] for row in document["formats"]]
    nothing = count(())
    rows = []
    for part, cells in by_part(document).items():
        text = document["parts"].get(part, "")
        head = f'<th scope="row">{_escape(part).replace("/", "/<wbr>")}<small>{_escape(text)}</small></th>'
        rows.append(f"<tr>{head}{''.join(_cell(cells.get(kind, nothing)) for kind in formats)}</tr>")
    kind = "few" if len(formats) <= _FEW else ""
    return _table(["Case", *map(_escape, formats)], rows, label="Cases by format", kind=kind)


def _paths(document: Mapping[str, Any]) -> str:
    contracts, paths = by_path(document)
    rows = []
    for path, cells in paths:
        code = _escape(path["path"]).replace("_", "_<wbr>").replace("/", "<wbr>/")
        head = f'<th scope="row"><code>{code}</code><small>{_escape(path["kind"])}</small></th>'
        told = (path["format"], path["standing"], path_verdict(path))
        facts = "".join(f"<td>{_escape(text)}</td>" for text in told)
        rows.append(f"<tr>{head}{facts}{''.join(map(_cell, cells))}</tr>")
    if not rows:
        return ""
    return _section(
        "Kernel paths",
        "What really ran, as the core counted it, and what its makers know of it on such hardware; “interpreted” says "
        "nothing about any GPU. A path stands for a format where every case that concerns it passed: one that ended "
        "before it told its path, as a crash does, counts against every path that it could have concerned.",
        _table(
            ["Path", "Format", "Standing", "Verdict", *(name.replace("-", "-<wbr>") for name in contracts)],
            rows,
            label="Cases by kernel path",
            kind="paths",
        ),
    )


def _section(title: str, lead: str, body: str) -> str:
    first = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section><h2>{_escape(title)}</h2>{first}{body}</section>"


def _lines(text: str, end: str) -> str:
    return end.join(map(_escape, text.splitlines()))


def _findings(document: Mapping[str, Any]) -> str:
    found = [item for item in document["results"] if item["outcome"] in BAD_VALUES]
    if not found and not document["missing"]:
        return ""
    lines = [
        f'<div class="finding {item["outcome"]}"><b>{SIGNS[item["outcome"]]} {_escape(NAMES[item["outcome"]])}</b> '
        f"<code>{_escape(item['case'])}</code><br>{_lines(item['message'], '<br>')}"
        f"{'<pre>' + _lines(item['reproducer'], chr(10)) + '</pre>' if item.get('reproducer') else ''}</div>"
        for item in found[:_MOST_FINDINGS]
    ]
    if len(found) > _MOST_FINDINGS:
        lines.append(f"<p>… and {len(found) - _MOST_FINDINGS} more; the JSON file has all.</p>")
    if document["missing"]:
        lines.append(f'<div class="finding failed">{len(document["missing"])} cases have no result.</div>')
    return _section("What went wrong", "", "".join(lines))


def _not_tested(document: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row">{_escape(row["what"])}</th><td>{_escape(row["why"])}</td>'
        f"<td>{row['cases'] or ''}</td></tr>"
        for row in document["not_tested"]
    ]
    table = (
        '<table><thead><tr><th scope="col">What</th><th scope="col">Why</th><th scope="col">Cases</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    body = f'<details><summary>{len(rows)} kinds of things</summary><div class="wide">{table}</div></details>'
    return _section("What was not tested", "None of this counts as a pass.", body if rows else "<p>Nothing.</p>")


def _declared(document: Mapping[str, Any]) -> str:
    lines = [
        f'<div class="finding interpreted"><code>{_escape(item["case"])}…</code> {_escape(said_of(item))}</div>'
        for item in (*document["overrides"], *document["known_failures"])
    ]
    lead = "Wider bounds and known failures that the author declares, each with a reason."
    return _section("Overrides", lead, "".join(lines) or "<p>None: every bound is the kit's own.</p>")


def _manifest(document: Mapping[str, Any]) -> str:
    declared = document["manifest"].get("capabilities", {})
    lines = [
        (name.replace("_", " "), ", ".join(map(str, value)))
        for name, value in declared.items()
        if isinstance(value, list) and value
    ]
    if not lines:
        return ""
    return _section("Manifest", "What the plugin declares. It is judged on this, and on nothing else.", _list(lines))


def _list(lines: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{_escape(name)}</dt><dd>{_escape(text)}</dd>' for name, text in lines)}</dl>"


def _tone(name: str, number: int) -> str:
    if not number:
        return "empty"
    return "fallback" if name == "passed_by_fallback" else name


def _header(document: Mapping[str, Any]) -> str:
    subject, counts, seal = document["subject"], document["counts"], seal_of(document)
    name = subject_of(document)
    passed, required = required_of(document)
    tiles = [(name, counts[name], SIGNS[name]) for name in _OUTCOMES if name != Outcome.PASS.value]
    tiles.insert(0, ("passed_by_fallback", counts["passed_by_fallback"], "↺"))
    items = (
        f'<li class="{_tone("pass", passed)}"><b><i aria-hidden="true">{SIGNS["pass"]}</i> {passed:,}</b>'
        f"<span>passed of {required:,} required</span></li>"
    )
    items += "".join(
        f'<li class="{_tone(name, number)}"><b><i aria-hidden="true">{mark}</i> '
        f"{number:,}</b><span>{_TILES.get(name, NAMES[name])}</span></li>"
        for name, number, mark in tiles
    )
    device = document["device"]
    place = device.get("gpu") or device.get("processor") or device["device"]
    day = document["volatile"]["date"][:10]
    place += " through an interpreter, on no GPU" if device["interpreted"] else ""
    return (
        f'<header class="{seal.tone}"><div><p class="kicker">q4 conformance {document["kind"]}</p>'
        f"<h1>{_escape(name)}<small>{_escape(title_of(document).removeprefix(name))}</small></h1>"
        f'<p class="lead">{_escape(subject["profile"])} profile on {_escape(subject["device"])} · {_escape(place)}<br>'
        f"{_escape(document['sentence'].capitalize())}.<br>{_escape(f'{counted(document)}. {not_meant(document)}')}"
        "</p></div>"
        f'<div class="seal {seal.tone}"><b>{seal.sign} {seal.word}</b><span>{seal.note}<br>{day}</span></div>'
        f'<ul class="tiles">{items}</ul></header>'
    )


def to_html(document: Mapping[str, Any]) -> str:
    """Return the page of a document."""
    style = importlib.resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    title = f"{title_of(document)} on {document['subject']['device']}: {seal_of(document).word}"
    legend = "".join(
        f'<li><span class="cell {name}">{sign}</span> {NAMES[name]}</li>' for name, sign in SIGNS.items() if sign
    )
    lead = "The sign is the worst that happened. “✓ 40/77”: 40 of 77 passed, the others are not declared."
    body = [
        _header(document),
        _findings(document),
        _section("Cases by format", lead, f'<ul class="legend">{legend}</ul>' + _matrix(document)),
        _paths(document),
        _not_tested(document),
        _declared(document),
        _manifest(document),
        _section("Facts", "", _list(facts_of(document))),
    ]
    verify = "q4 conform --verify certificate.json"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>\n{style}</style></head>\n<body><main>\n{chr(10).join(filter(None, body))}\n"
        f"<footer><p>{_escape(document['statement'])} Check the file beside this page with <code>{verify}</code>.</p>"
        "</footer></main></body></html>\n"
    )
