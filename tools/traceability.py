"""Makes docs/traceability.md: use cases ↔ contract cases ↔ tests ↔ plugins ↔ the last certificates.

It reads the kit's tables, the ids of the tests that pytest collects, the plugins'
sources and what certificates there are; nothing is typed by hand but which use case a contract case proves, which is
data in ``tools.use_cases``.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import attrs

from q4_conformance.report.tally import SIGNS
from tests.support.parts import TABLES, UNCAUGHT, catchers
from tests.support.parts import parts as parts_of_tables
from tests.support.running import collected, files_by_part
from tools.use_cases import USE_CASES, USES, uses_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_conformance import Case

__all__ = [
    "CERTIFICATES",
    "PAGE",
    "SHOWN_BY",
    "Part",
    "Table",
    "certificates",
    "page_of",
    "parts",
    "problems",
    "tables",
    "unshown",
]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "traceability.md"
CERTIFICATES = ROOT / "docs" / "certificates"
_HOOKS = {
    "linear": "q4_backends",
    "backend": "q4_backends",
    "device": "q4_backends",
    "memory": "q4_memory_providers",
    "dialect": "q4_dialects",
    "layer": "q4_layers",
    "program": "q4_backends",
}
"""Table of cases → the hook of the plugins that it concerns; the core's concern the core alone."""

_INTRODUCTION = """\
From what people do to what proves it: [use cases](use-cases.md), contract cases, the tests that run them, the plugins
that they concern and how they ended in the last certificates. Made by `python -m tools.traceability`."""


_PARTS = """\
Each part of a contract case, how many planted faults it must catch, and the files with tests that CI runs of it: by
those tests' own ids. What the part must end as is each test's to say: where a plugin does not declare something, that
is NOT_DECLARED."""


_PLUGINS = """\
How the cases of each contract case ended for each plugin, by the pages under `docs/certificates` (✓ passed, ○ not
testable here, – not declared), and one command that shows it. The kernels of nf4-cuda and nvfp4-native are interpreted
there."""
Certificates: TypeAlias = "Mapping[str, Mapping[str, Mapping[str, int]]]"
"""Name → contract → outcome → cases."""
_MANAGED = "`pytest plugins/um-managed/tests/test_um_contract.py -k {}`, over a pretended driver"
SHOWN_BY = {
    "TC-15": "`pytest plugins/nvfp4-native/tests/test_nvfp4_contract.py -k TC-15`, emulated",
    **{name: _MANAGED.format(name) for name in ("TC-21", "TC-22")},
    **dict.fromkeys(("EX-13", "EX-18"), "`nox -s gpu`"),
    "EX-20": "`pytest tests/contract/test_layer_faults.py`, every installed layer type",
}
"""Contract case → the command that shows it where no certificate does."""


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


@functools.cache
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


def certificates(folder: Path = CERTIFICATES) -> dict[str, dict[str, dict[str, int]]]:
    """Return name → contract → outcome → cases, of each page below a folder; the worst outcome of a cell counts."""
    return {
        page.parent.name: _outcomes(page.read_text(encoding="utf-8"))
        for page in sorted(folder.glob("*/*.md"))
        if page.stem in {"certificate", "report"}
    }


def _outcomes(page: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    outcomes = {sign: name for name, sign in SIGNS.items() if sign}
    for contract, cells in re.findall(r"^\| ((?:TC|EX)-\d\d)/\S+ \| [^|]+ \|(.*)\|$", page, re.MULTILINE):
        for sign, number in re.findall(r"(\S) (\d+)(?:/\d+)? \|", f"{cells}|"):
            counts = found.setdefault(contract, {})
            counts[outcomes[sign]] = counts.get(outcomes[sign], 0) + int(number)
    return found


def _plugin_of(name: str) -> str:
    """Return the plugin that brings what a certificate is of."""
    if name.startswith("simple-"):
        return "q4core"
    name = name.removesuffix("-programs")  # a backend's page of another profile
    return name if name == "q4core" or (ROOT / "plugins" / name).is_dir() else "dialects"


def unshown(documents: Certificates) -> list[str]:
    """Return the contract cases that pass in no certificate and for which no command is named that would show them."""
    passed = {name for found in documents.values() for name, counts in found.items() if counts.get("pass")}
    return [name for name in USES if name not in passed and name not in SHOWN_BY]


def _plugin_rows(documents: Certificates) -> list[tuple[str, ...]]:
    plugins = sorted({*map(_plugin_of, documents)})
    rows: list[tuple[str, ...]] = [("case", *plugins, "one command that shows it")]
    for contract in USES:
        cells, command = [], SHOWN_BY.get(contract, "")
        for plugin in plugins:
            counts: dict[str, int] = {}
            for name, found in documents.items():
                if _plugin_of(name) == plugin:
                    for outcome, number in found.get(contract, {}).items():
                        counts[outcome] = counts.get(outcome, 0) + number
                    if found.get(contract, {}).get("pass") and not command:
                        command = f"`nox -s conformance -- {name}`"
            cells.append(", ".join(f"{SIGNS[outcome]} {number}" for outcome, number in counts.items()))
        rows.append((contract, *cells, command or "none yet"))
    return rows


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


def _verdicts(contract: str, documents: Certificates) -> str:
    """Return how the cases of a contract ended in each certificate."""
    told = [
        f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(found[contract].items()))
        for name, found in documents.items()
        if contract in found
    ]
    return "; ".join(told) or "none yet"


def page_of(found: Iterable[Table], parts_: Iterable[Part], documents: Certificates) -> str:
    """Return the page, as Markdown."""
    chosen = tuple(found)
    plugin_rows = _plugin_rows(documents)
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
        "## Plugins",
        _PLUGINS,
        _table(plugin_rows[0], plugin_rows[1:]),
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


def _case_rows(found: tuple[Table, ...], documents: Certificates) -> list[tuple[str, ...]]:
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
