"""Records of programs, attached to the layers that they run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from q4core.diagnostics.events import emit
from q4core.extension import attach_record, record_of
from q4core.layers.diagnosis import ProgramRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.layers.linear import Q4Linear


def attach(record: ProgramRecord, layers: Sequence[Q4Linear]) -> ProgramRecord:
    """Attach a record to layers, and log it; one of the same name on the same backend goes on counting."""
    emit(
        "q4.program",
        level=logging.INFO,
        program=record.name,
        backend=record.backend,
        steps=record.steps,
        reasons=list(record.reasons),
    )
    for layer in layers:
        old = record_of(layer, ProgramRecord.section, name=record.name)
        if isinstance(old, ProgramRecord) and old is not record and old.backend == record.backend:
            record.calls = max(record.calls, old.calls)
    attach_record(record, layers, name=record.name)
    return record


def refuse(name: str, layers: Sequence[Q4Linear], reason: str) -> ProgramRecord:
    """Note, for the reports of these layers, why a program is not made, and return the record."""
    return attach(ProgramRecord(name, reasons=(reason,)), layers)
