"""``Diagnostics`` and ``Report``: which backend and path ran, and why each other one did not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from q4core.errors import counted
from q4core.selection.result import Selection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4core.backend import Segment

_SUMMARY = ("format", "backend", "compute_path", "fallback_reason", "native_load_state")
_COUNTED = ("prepared_bytes", "source_bytes", "outlier_rows", "notes", "memory")


@attrs.frozen(kw_only=True)
class Diagnostics(Selection):
    """The record of one layer: its selection, and what was counted; ``summary`` has five facts of it.

    Args:
        layer: Its name.
        calls: How often each segment of the selection ran. Replayed CUDA graphs don't tick.
        prepared_bytes: Bytes of the buffers.
        source_bytes: Those of them that are the source, held because the backend can't export.
        outlier_rows: Rows of x that had outliers, where activations are rounded: they cost more time, or precision.
        notes: What was assumed while the weight was read.
        memory: What became of the buffers under the unified-memory policy, one line each; then where the bias lies.
        input_memory: What became of x under it, with how many calls; empty under DISABLED.
    """

    layer: str
    calls: tuple[int, ...]
    prepared_bytes: int
    source_bytes: int
    outlier_rows: int = 0
    notes: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    input_memory: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.request.format.name

    @property
    def path_name(self) -> str:
        """The path that ran most often; before any call, the one chosen for the lowest M."""
        most = max(range(len(self.calls)), key=lambda index: (self.calls[index], -index))
        return self.segments[most].path.name

    @property
    def native_load_state(self) -> str:
        """What the backend said of its native part."""
        return self.native_state

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.request.out_features, self.request.in_features

    @property
    def device(self) -> str:
        """Where it runs."""
        return str(self.request.device)

    @property
    def dtype(self) -> str:
        """dtype of x."""
        return str(self.request.dtype).removeprefix("torch.")

    def summary(self) -> dict[str, str | None]:
        """Return ``format``, ``backend``, ``compute_path``, ``fallback_reason`` and ``native_load_state`` alone."""
        record = super().to_dict()
        return {name: record[name] for name in _SUMMARY}

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, texts and numbers, ready for JSON: those of the selection, and the counters."""
        record = {"layer": self.layer} | super().to_dict()
        record["path_name"] = self.path_name
        record["paths"] = [path | {"calls": calls} for path, calls in zip(record["paths"], self.calls, strict=True)]
        counted = {name: getattr(self, name) for name in _COUNTED}
        return record | counted | {"input_memory": dict(self.input_memory)}

    def __str__(self) -> str:
        """Return the record as a few lines."""
        size = f"{self.shape[0]}×{self.shape[1]}"
        proven = "proven" if self.proven else "not proven yet"
        lines = [f"{self.layer}: {self.format} {size} on {self.device}, {self.backend} ({self.native_state}; {proven})"]
        for segment, calls in zip(self.segments, self.calls, strict=True):
            lines.append(f"  M {_span(segment)}: {segment.path.name} [{segment.path.facts}] ran {calls} ×")
        lines.extend(f"  gradient, M {_span(segment)}: {segment.path.name}" for segment in self.gradients)
        lines.extend(f"  gradient refused: {reason}" for reason in self.gradients_refused)
        if self.outlier_rows:
            lines.append(f"  outliers in {counted(self.outlier_rows, 'row')} of x")
        if self.fallback_reason:
            lines.append(f"  fallback: {self.fallback_reason}")
        lines.extend(f"  disqualified: {reason}" for reason in self.disqualified)
        lines.extend(f"  not {rejection}" for rejection in self.rejections)
        lines.extend(f"  note: {note}" for note in self.notes)
        lines.extend(f"  memory: {line}" for line in self.memory)
        lines.extend(f"  memory of x: {line} ({count} ×)" for line, count in self.input_memory.items())
        return "\n".join(lines)


def _span(segment: Segment) -> str:
    return f"{segment.low}…{'∞' if segment.high is None else segment.high}"


@attrs.define(eq=False)
class Record:
    """A record that a library attaches to layers: a section of their reports and of its JSON; ``str`` gives its lines.

    Subclasses are attrs classes whose fields JSON can hold, and set ``section``, the section's name.
    """

    section: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, texts and numbers, ready for JSON."""
        return attrs.asdict(self)


@attrs.frozen
class Report:
    """The records of many layers, and those that libraries attached to them.

    Args:
        layers: A record for each layer.
        records: What libraries attached, section by section: ``programs`` that run the layers, products of ``spikes``.
    """

    layers: tuple[Diagnostics, ...]
    records: tuple[Record, ...] = ()

    def section(self, name: str) -> tuple[Any, ...]:
        """Return the attached records of a section; empty where there are none."""
        return tuple(record for record in self.records if record.section == name)

    @property
    def path_calls(self) -> dict[str, int]:
        """(backend/path) → how often it ran, over all layers, most often first."""
        total: dict[str, int] = {}
        for record in self.layers:
            for segment, calls in zip(record.segments, record.calls, strict=True):
                name = f"{record.backend}/{segment.path.name}"
                total[name] = total.get(name, 0) + calls
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    @property
    def prepared_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(record.prepared_bytes for record in self.layers)

    @property
    def source_bytes(self) -> int:
        """Bytes of the sources that are held."""
        return sum(record.source_bytes for record in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, texts and numbers, ready for JSON."""
        return {
            "layers": [record.to_dict() for record in self.layers],
            **{record.section: [item.to_dict() for item in self.section(record.section)] for record in self.records},
            "path_calls": self.path_calls,
            "prepared_bytes": self.prepared_bytes,
            "source_bytes": self.source_bytes,
            "note": "calls replayed from CUDA graphs are not counted",
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def __str__(self) -> str:
        """Return the report as text."""
        if not self.layers:
            return "no 4-bit layers"
        total = f"{counted(len(self.layers), 'layer')}, {self.prepared_bytes:,} bytes prepared"
        held = f" ({self.source_bytes:,} of them sources held in memory)" if self.source_bytes else ""
        return "\n".join([*map(str, self.layers), *map(str, self.records), f"{total}{held}"])
