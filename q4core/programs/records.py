"""Records of programs, kept with the layers that they run, for reports."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from q4core.diagnostics.events import emit
from q4core.layers.diagnosis import ProgramRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4core.layers.linear import Q4Linear

_records: weakref.WeakKeyDictionary[Q4Linear, dict[str, ProgramRecord]] = weakref.WeakKeyDictionary()


def keep(record: ProgramRecord, layers: Iterable[Q4Linear]) -> ProgramRecord:
    """Keep a record with layers, and tell it; one of the same name on the same backend goes on counting."""
    emit(
        "q4.program",
        level=logging.INFO,
        program=record.name,
        backend=record.backend,
        steps=record.steps,
        reasons=list(record.reasons),
    )
    for layer in layers:
        known = _records.setdefault(layer, {})
        old = known.get(record.name)
        if old is not None and old is not record and old.backend == record.backend:
            record.calls = max(record.calls, old.calls)
        known[record.name] = record
    return record


def refuse(name: str, layers: Iterable[Q4Linear], reason: str) -> ProgramRecord:
    """Note, for the reports of these layers, why a program is not made, and return the record."""
    return keep(ProgramRecord(name, reasons=(reason,)), layers)


def records_of(layers: Iterable[Q4Linear]) -> tuple[ProgramRecord, ...]:
    """Return the records of programs over any of these layers, each once."""
    found = [record for layer in layers for record in _records.get(layer, {}).values()]
    return tuple({id(record): record for record in found}.values())
