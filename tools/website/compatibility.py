"""The page of contract outcomes, made from ``docs/certificates`` and stored runs on GPUs while the site is built."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tools.website.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Certificate", "CertificateError", "page", "read", "read_gpu"]

ROOT = Path(__file__).parents[2]
CERTIFICATES, RESULTS = ROOT / "docs" / "certificates", ROOT / "benchmarks" / "results"
_TITLE = re.compile(r"# (?:(?P<what>.+) of )?(?P<package>\S+) (?P<version>\S+) on (?P<device>[\w:]+): . (?P<state>.+)")
WORST_FIRST = "✗✸◷○◐✓–"
"""Signs of outcomes: of those of several cases, the one that comes first here is shown."""
FORMATS = ("nf4", "fp4", "nvfp4", "mxfp4", "q4_0", "q4_1", "iq4_nl", "int4", "int8", "q8_0", "q8_affine")


class CertificateError(RuntimeError):
    """A stored certificate is not in the form that ``q4 conform`` writes."""


@attrs.frozen
class Certificate:
    """What one page of ``docs/certificates`` says."""

    name: str
    page: str
    kind: str
    """``backend``, or what the page calls the plugin: ``dialect``, ``reader``, …"""
    package: str
    device: str
    state: str
    made: str
    outcomes: dict[str, dict[str, str]]
    """Format, or ``any`` → contract case, such as ``TC-09`` → sign and number of cases."""


def _add(counts: dict[str, dict[str, dict[str, int]]], name: str, case: str, text: str) -> None:
    own = counts.setdefault(name, {}).setdefault(case.partition("/")[0], {})
    for sign, number in re.findall(rf"([{WORST_FIRST}]) ?([\d,]*)", text):
        own[sign] = own.get(sign, 0) + int((number or "1").replace(",", ""))


def _signs(counts: dict[str, dict[str, dict[str, int]]]) -> dict[str, dict[str, str]]:
    return {
        name: {
            case: " ".join(f"{sign} {own[sign]}" for sign in WORST_FIRST if sign in own) for case, own in cases.items()
        }
        for name, cases in counts.items()
    }


def _parse(path: Path) -> Certificate:
    text = path.read_text(encoding="utf-8")
    title = _TITLE.match(text)
    made = re.search(r"^\| Made \| (\d{4}-\d\d-\d\d)", text, re.MULTILINE)
    section = text.partition("## Cases by format\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    if title is None or made is None or len(lines) <= 2 or lines[0][:2] != ["case", "what must hold"]:  # noqa: PLR2004
        raise CertificateError(f"{path}: is not a page that q4 conform writes")
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for row in lines[2:]:
        for name, text_of_cell in zip(lines[0][2:], row[2:], strict=True):
            if text_of_cell:
                _add(counts, name, row[0], text_of_cell)
    kind = "core" if title["what"] is None else title["what"].rpartition(" ")[0] or "backend"
    where = f"certificates/{path.parent.name}/{path.name}"
    return Certificate(
        path.parent.name, where, kind, title["package"], title["device"], title["state"], made[1], _signs(counts)
    )


def read(folder: Path = CERTIFICATES) -> list[Certificate]:
    """Return what each stored page says, by name.

    Raises:
        CertificateError: A page has another form, or a folder has no page.
    """
    empty = [path.name for path in folder.iterdir() if path.is_dir() and not [*path.glob("*.md")]]
    if empty:
        raise CertificateError(f"docs/certificates: no page in {', '.join(sorted(empty))}")
    return [_parse(path) for path in sorted(folder.glob("*/*.md"))]


def read_gpu(folder: Path = RESULTS) -> Iterator[Certificate]:
    """Yield what ran on each GPU with a stored result, by backend, format and contract case."""
    words = {"pass": "✓", "fail": "✗", "crash": "✸", "timeout": "◷", "not_declared": "–", "not_testable": "○"}
    for path in sorted(folder.glob("gpu-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        stage = result["stages"].get("cases")
        if stage is None:
            continue
        counts: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
        for case, outcome in stage["cases"].items():
            backend, _, rest = case.partition(": ")
            parts = rest.split("/")
            name = next((part.split("-")[0] for part in parts[2:] if part.split("-")[0] in FORMATS), "any")
            _add(counts.setdefault(backend, {}), name, parts[0], words.get(outcome, "✗") + " 1")
        for report, own in stage["reports"].items():
            backend, _, name = report.partition(", ")
            if own["not_run"]:
                counts.setdefault(backend, {}).setdefault(name, {})["not run"] = {"○": own["not_run"]}
        for backend, found in counts.items():
            device, made, state = result["device"]["name"], stage["run"][:10], "no certificate"
            yield Certificate(backend, "gpu.md", "backend", f"q4-{backend}", device, state, made, _signs(found))


def _order(name: str) -> tuple[int, str]:
    return (FORMATS.index(name) if name in FORMATS else len(FORMATS), name)


def _cases(found: Sequence[Certificate]) -> list[str]:
    names = {case for one in found for cases in one.outcomes.values() for case in cases}
    return sorted(names, key=lambda name: (not name.startswith("TC"), not name.startswith("EX"), name))


def _sections(found: Sequence[Certificate]) -> Iterator[str]:
    """Yield a table for each backend, then one for each other kind, in which a row is a plugin and a format."""
    backends = [one for one in found if one.kind == "backend"]
    for one in sorted(backends, key=lambda one: (one.name, one.device != "cpu")):
        yield f"### {one.name} on {one.device}"
        yield f"{one.state}, {one.made}: [page]({one.page})."
        rows = [[case, *(own.get(case, "") for _, own in _sorted(one))] for case in _cases([one])]
        yield table(["case", *(name for name, _ in _sorted(one))], rows)
    yield "## Dialects, files and the rest"
    for kind in sorted({one.kind for one in found} - {"backend"}):
        own = [one for one in found if one.kind == kind]
        cases = _cases(own)
        rows = [
            [f"[{one.name}]({one.page})", name, one.device, one.state, *(outcomes.get(case, "") for case in cases)]
            for one in own
            for name, outcomes in _sorted(one)
        ]
        yield f"### Plugins of the kind: {kind}"
        yield table(["plugin", "format", "device", "state", *cases], rows)


def _sorted(one: Certificate) -> list[tuple[str, dict[str, str]]]:
    return sorted(one.outcomes.items(), key=lambda item: _order(item[0]))


def _overview(found: Sequence[Certificate]) -> str:
    backends = [one for one in found if one.kind == "backend"]
    rows = []
    for one in sorted(backends, key=lambda one: (one.name, one.device != "cpu")):
        signs = [_worst("".join(one.outcomes.get(name, {}).values())) for name in FORMATS]
        rows.append([f"[{one.name}]({one.page})", one.device, one.state, *signs])
    return table(["plugin", "device", "state", *FORMATS], rows)


def _worst(outcomes: str) -> str:
    return next((sign for sign in WORST_FIRST if sign in outcomes), "")


def page() -> str:
    """Return the generated part of the page.

    Raises:
        CertificateError: A stored page has another form.
    """
    found = [*read(), *read_gpu()]
    parts = ["## Backends", _overview(found), *_sections(found)]
    return "\n\n".join(parts) + "\n"
