"""Records of programs, attached to the layers that they run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from q4core.extension import Record, attach_record, record_of
from q4core.plugin_api import emit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core import Q4Linear

__all__ = ["ProgramRecord", "attach", "refuse"]


@attrs.define(eq=False)
class ProgramRecord(Record):
    """The state of a program: the backend that runs it, and reasons against others.

    Args:
        name: Its name.
        backend: Who runs it; None where the modules run one by one.
        steps: Operations of a run.
        reasons: Why no other backend runs it, or why there is no program.
        calls: How often it ran.
    """

    section = "programs"

    name: str
    backend: str | None = None
    steps: int = 0
    reasons: tuple[str, ...] = ()
    calls: int = 0

    def __str__(self) -> str:
        """Return the record as a few lines."""
        ran = "the modules run one by one"
        if self.backend is not None:
            ran = f"{self.steps} steps on {self.backend}, ran {self.calls} ×"
        return "\n".join([f"program {self.name}: {ran}", *(f"  {reason}" for reason in self.reasons)])


def attach(record: ProgramRecord, layers: Sequence[Q4Linear]) -> ProgramRecord:
    """Attach a record to layers, and log it; one of the same name on the same backend continues its count."""
    facts = {"program": record.name, "backend": record.backend, "steps": record.steps}
    emit("q4.program", level=logging.INFO, **facts, reasons=list(record.reasons))
    for layer in layers:
        old = record_of(layer, ProgramRecord.section, name=record.name)
        if isinstance(old, ProgramRecord) and old is not record and old.backend == record.backend:
            record.calls = max(record.calls, old.calls)
    attach_record(record, layers, name=record.name)
    return record


def refuse(name: str, layers: Sequence[Q4Linear], reason: str) -> ProgramRecord:
    """Note, for the reports of these layers, why a program is not made, and return the record."""
    return attach(ProgramRecord(name, reasons=(reason,)), layers)
