"""Makes docs/traceability.md: use cases ↔ contract cases ↔ tests ↔ plugins ↔ the last certificates.

``nox -s traceability`` runs it. It reads the kit's tables, the ids of the tests that pytest collects, the plugins'
sources and what certificates there are; nothing is typed by hand but which use case a contract case proves, which is
data in ``q4_conformance.contract.uses``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from parts import TABLES, UNCAUGHT, catchers
from parts import parts as parts_of_tables
from running import collected, files_by_part

from q4_conformance.contract.uses import USE_CASES, USES, uses_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_conformance import Case

__all__ = ["CERTIFICATES", "PAGE", "Part", "Table", "certificates", "page_of", "parts", "problems", "tables"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "traceability.md"
CERTIFICATES = ROOT / "docs" / "certificates"
_HOOKS = {
    "linear": "q4_backends",
    "backend": "q4_backends",
    "device": "q4_backends",
    "memory": "q4_memory_providers",
    "dialect": "q4_dialects",
}
"""Table of cases → the hook of the plugins that it concerns; the core's concern the core alone."""

_INTRODUCTION = """\
From what people do to what proves it: [use cases](use-cases.md), contract cases, the tests that run them, the plugins
that they concern and how they ended in the last certificates. Made by `nox -s traceability`."""


_PARTS = """\
Each part of a contract case, how many planted faults it must catch, and the files with tests that CI runs of it: by
those tests' own ids. What the part must end as is each test's to say: where a plugin does not declare something, that
is NOT_DECLARED."""


@attrs.frozen
class Table:
    """One table of the kit.

    Args:
        name: Such as ``"linear"``.
        cases: Its cases.
        plugins: The plugins that it concerns.
    """

    name: str
    cases: tuple[Case, ...]
    plugins: tuple[str, ...]


@attrs.frozen
class Part:
    """One part of a contract case in one table.

    Args:
        table: Name of the table.
        name: Such as ``"TC-09/bias"``.
        cases: How many cases it has.
        faults: How many planted faults it is to catch.
        tests: The files with tests that run one of its cases, from the repository's root.
        excuse: Why no fault is planted here, where none is.
    """

    table: str
    name: str
    cases: int
    faults: int
    tests: tuple[str, ...]
    excuse: str = ""


def tables() -> tuple[Table, ...]:
    """Return every table of the kit, with its plugins."""
    return tuple(Table(name, cases, _plugins_with(_HOOKS.get(name))) for name, cases in TABLES.items())


def parts() -> tuple[Part, ...]:
    """Return every part of the contract, in its order, with the faults and tests that there are."""
    tests = files_by_part(collected())
    caught = [part for _, found in catchers() for part in found]
    places = [*USES]
    found = [
        Part(table, name, len(cases), caught.count((table, name)), tests[table, name], UNCAUGHT.get((table, name), ""))
        for (table, name), cases in parts_of_tables().items()
    ]
    return tuple(sorted(found, key=lambda part: (places.index(part.name.split("/")[0]), part.name, part.table)))


def _plugins_with(hook: str | None) -> tuple[str, ...]:
    if hook is None:
        return ("q4core",)
    files = sorted(ROOT.glob("plugins/*/src/*/*.py"))
    return tuple(dict.fromkeys(file.parents[2].name for file in files if f"def {hook}(" in file.read_text("utf-8")))


def certificates(folder: Path = CERTIFICATES) -> dict[str, dict[str, Any]]:
    """Return the documents below a folder by the name of their own folders."""
    return {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*/certificate.json"))
    }


def problems(tables_: Iterable[Table], parts_: Iterable[Part]) -> list[str]:
    """Return what is missing: a use case without a case, a case without a use case or without a test."""
    told, found = [], tuple(tables_)
    contracts = {case.contract for table in found for case in table.cases}
    proven = {use for contract in contracts for use in USES.get(contract, ())}
    told += [f"{use} has no case" for use in USE_CASES if use not in proven]
    told += [f"{contract} proves no use case" for contract in sorted(contracts - set(USES))]
    untested = [part for part in parts_ if not part.tests and not part.excuse]
    told += [f"no test runs {part.name} of the table {part.table!r}" for part in untested]
    return told


def _verdicts(contract: str, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how the cases of a contract ended in each certificate."""
    told = []
    for name, document in documents.items():
        counts: dict[str, int] = {}
        for result in document["results"]:
            if result["case"].split("/")[0] == contract:
                counts[result["outcome"]] = counts.get(result["outcome"], 0) + 1
        if counts:
            told.append(f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return "; ".join(told) or "none yet"


def page_of(found: Iterable[Table], parts_: Iterable[Part], documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page, as Markdown."""
    chosen = tuple(found)
    pieces = [
        "# Traceability",
        _INTRODUCTION,
        "## Use cases",
        _table(("use case", "what", "proved by"), _use_rows(chosen)),
        "## Contract cases",
        _table(
            ("case", "what must hold", "use cases", "tables", "cases", "last certificates"),
            _case_rows(chosen, documents),
        ),
        "## Parts",
        _PARTS,
        _table(("part", "table", "cases", "faults", "tests"), map(_part_row, parts_)),
        "## Tables",
        "Each table of the kit, and the plugins that its cases judge.",
        _table(("table", "cases", "plugins"), map(_table_row, chosen)),
    ]
    return "\n\n".join(pieces) + "\n"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _by_contract(found: tuple[Table, ...]) -> dict[str, dict[str, list[Case]]]:
    """Return contract → table → cases, in the contract's order; contracts without cases as well."""
    result: dict[str, dict[str, list[Case]]] = {contract: {} for contract in USES}
    for table in found:
        for case in table.cases:
            result.setdefault(case.contract, {}).setdefault(table.name, []).append(case)
    return result


def _use_rows(found: tuple[Table, ...]) -> list[tuple[str, ...]]:
    there = [contract for contract, tables_ in _by_contract(found).items() if tables_]
    return [
        (use, title, ", ".join(contract for contract in there if use in uses_of(contract)))
        for use, title in USE_CASES.items()
    ]


def _case_rows(found: tuple[Table, ...], documents: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for contract, tables_ in _by_contract(found).items():
        texts = dict.fromkeys(case.text for cases_ in tables_.values() for case in cases_)
        count = sum(map(len, tables_.values()))
        rows.append(
            (
                contract,
                "; ".join(texts) or "no case yet",
                ", ".join(uses_of(contract)),
                ", ".join(tables_),
                str(count),
                _verdicts(contract, documents),
            )
        )
    return rows


def _part_row(part: Part) -> tuple[str, ...]:
    tests = ", ".join(f"`{path}`" for path in part.tests)
    return part.name, part.table, str(part.cases), part.excuse or str(part.faults), tests or "`nox -s gpu`"


def _table_row(table: Table) -> tuple[str, ...]:
    return table.name, str(len(table.cases)), ", ".join(table.plugins) or "none yet"


if __name__ == "__main__":
    PAGE.write_text(page_of(tables(), parts(), certificates()), encoding="utf-8")
