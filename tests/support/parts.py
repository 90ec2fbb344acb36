"""The parts of the contract: cases of one table that judge the same thing, and the planted faults that each catches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from q4_conformance.contract import cases, plain_cases
from q4_conformance_faults import (
    DEVICE_FAULTS,
    DIALECT_FAULTS,
    FAULTS,
    FILE_FAULTS,
    FUNCTION_FAULTS,
    LAYER_FAULTS,
    PROGRAM_FAULTS,
    PROVIDER_FAULTS,
)
from tests.support.broken_core import CORE_FAULTS

if TYPE_CHECKING:
    from q4_conformance import Case

__all__ = ["TABLES", "UNCAUGHT", "catchers", "part_of", "parts"]


def _tables() -> dict[str, tuple[Case, ...]]:
    found = {name: value for module in (cases, plain_cases) for name, value in vars(module).items()}
    others = {"plain_cases", "select_cases"}
    names = sorted(name for name in found.keys() - others if name.endswith("_cases") and not name.startswith("_"))
    return {name.removesuffix("_cases"): found[name]() for name in names}


TABLES = _tables()
"""Name of each table of the kit, such as ``"linear"`` → its cases."""

_GPU = "needs a CUDA device"
UNCAUGHT: dict[tuple[str, str], str] = {
    ("backend", "TC-19/native"): f"{_GPU}: autograd takes no pretended one, and on the CPU the reference quantises",
    ("device", "EX-18/graph"): f"{_GPU}: a pretended one has no graphs",
    ("device", "EX-18/quiet"): f"{_GPU}: a pretended one never lets the host wait",
    ("device", "EX-18/stream"): f"{_GPU}: a pretended one has no streams",
}
"""Parts for which no fault is planted here, and why."""

_FAULTS = (
    (("backend", "linear"), FAULTS),
    (("device",), DEVICE_FAULTS),
    (("linear",), FUNCTION_FAULTS),
    (("memory",), PROVIDER_FAULTS),
    (("dialect",), DIALECT_FAULTS),
    (("file",), FILE_FAULTS),
    (("layer",), LAYER_FAULTS),
    (("program",), PROGRAM_FAULTS),
    (("backend", "core"), CORE_FAULTS),
)
"""Tables, and the faults whose catchers stand in them."""


def part_of(case: Case) -> str:
    """Return the part that a case belongs to, such as ``"TC-09/bias"``."""
    return f"{case.contract}/{case.part}"


@functools.cache
def parts() -> dict[tuple[str, str], tuple[Case, ...]]:
    """Return (table, part) → its cases, for every part of every table."""
    found: dict[tuple[str, str], list[Case]] = {}
    for table, rows in TABLES.items():
        for case in rows:
            found.setdefault((table, part_of(case)), []).append(case)
    return {part: tuple(rows) for part, rows in found.items()}


@functools.cache
def catchers() -> tuple[tuple[str, set[tuple[str, str]]], ...]:
    """Return each planted fault's name, and the parts of which a case is meant to catch it."""
    ids = {table: [(case.id, part_of(case)) for case in cases_] for table, cases_ in TABLES.items()}
    return tuple(
        (fault.name, {(table, part) for table in tables for id_, part in ids[table] if id_.startswith(fault.caught_by)})
        for tables, faults in _FAULTS
        for fault in faults
    )
