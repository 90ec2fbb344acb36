"""Makes docs/traceability.md: use cases ↔ contract cases ↔ tests ↔ plugins ↔ the last certificates.

``nox -s traceability`` runs it. It reads the kit's tables, the tests' and plugins' sources and what certificates there
are; nothing is typed by hand but which use case a contract case proves, which is data in ``q4_conformance.uses``.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from q4_conformance import cases, plain_cases
from q4_conformance.uses import USE_CASES, USES, uses_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_conformance import Case

__all__ = ["PAGE", "Table", "certificates", "page_of", "problems", "tables"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "traceability.md"
CERTIFICATES = ROOT / "docs" / "certificates"
_TESTS = ("tests/contract/test_*.py", "plugins/*/tests/test_*.py")
_HOOKS = {
    "linear": "q4_backends",
    "backend": "q4_backends",
    "device": "q4_backends",
    "memory": "q4_memory_providers",
    "dialect": "q4_dialects",
}
"""Table of cases → the hook of the plugins that it concerns; the core's concern the core alone."""
_RUNNERS = {
    "check_core": ("core",),
    "check_linear": ("linear",),
    "run_cases": ("linear", "backend"),
    "run_isolated": ("linear", "backend"),
}
"""Function of the kit → the tables that it runs."""


_INTRODUCTION = """\
From what people do to what proves it: [use cases](use-cases.md), contract cases, the tests that run them, the plugins
that they concern and how they ended in the last certificates. Made by `nox -s traceability`."""


@attrs.frozen
class Table:
    """One table of the kit.

    Args:
        name: Such as ``"linear"``.
        cases: Its cases.
        tests: The test files that run them, from the repository's root.
        plugins: The plugins that it concerns.
    """

    name: str
    cases: tuple[Case, ...]
    tests: tuple[str, ...]
    plugins: tuple[str, ...]


def tables() -> tuple[Table, ...]:
    """Return every table of the kit, with its tests and plugins."""
    modules = {name: module for module in (cases, plain_cases) for name in module.__all__}
    names = sorted(name.removesuffix("_cases") for name in modules if name.endswith("_cases"))
    names.remove("select")
    used = {path: _names_in(path) for pattern in _TESTS for path in sorted(ROOT.glob(pattern))}
    return tuple(
        Table(
            name,
            getattr(modules[f"{name}_cases"], f"{name}_cases")(),
            tuple(str(path.relative_to(ROOT)) for path, found in used.items() if name in found),
            _plugins_with(_HOOKS.get(name)),
        )
        for name in names
    )


def _names_in(path: Path) -> set[str]:
    """Return the tables whose cases a test file runs: those that it names, where it runs cases at all."""
    found = {node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)}
    run = {table for runner, run_by in _RUNNERS.items() if runner in found for table in run_by}
    if "run_case" in found:
        run |= {name.removesuffix("_cases") for name in found if name.endswith("_cases")}
    return run


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


def problems(found: Iterable[Table]) -> list[str]:
    """Return what is missing: a use case without a case, a case without a use case or without a test."""
    told = []
    contracts = {case.contract for table in found for case in table.cases}
    proven = {use for contract in contracts for use in USES.get(contract, ())}
    told += [f"{use} has no case" for use in USE_CASES if use not in proven]
    told += [f"{contract} proves no use case" for contract in sorted(contracts - set(USES))]
    told += [f"no test runs the cases of the table {table.name!r}" for table in found if not table.tests]
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


def page_of(found: Iterable[Table], documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page, as Markdown."""
    chosen = tuple(found)
    parts = [
        "# Traceability",
        _INTRODUCTION,
        "## Use cases",
        _table(("use case", "what", "proved by"), _use_rows(chosen)),
        "## Contract cases",
        _table(
            ("case", "what must hold", "use cases", "tables", "cases", "last certificates"),
            _case_rows(chosen, documents),
        ),
        "## Tables",
        "Each table of the kit, the tests that run its cases and the plugins that they judge.",
        _table(("table", "cases", "tests", "plugins"), map(_table_row, chosen)),
    ]
    return "\n\n".join(parts) + "\n"


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


def _table_row(table: Table) -> tuple[str, ...]:
    tests = ", ".join(f"`{path}`" for path in table.tests)
    return table.name, str(len(table.cases)), tests, ", ".join(table.plugins) or "none yet"


if __name__ == "__main__":
    PAGE.write_text(page_of(tables(), certificates()), encoding="utf-8")
