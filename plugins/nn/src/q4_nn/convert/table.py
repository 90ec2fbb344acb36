"""What became of each linear layer of a model that was converted."""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["Conversion", "ConversionTable"]


@attrs.frozen(kw_only=True)
class Conversion:
    """What became of one linear layer.

    Args:
        name: Its name in the model.
        action: ``converted``, ``skipped`` or ``failed``.
        reason: Why it was skipped or failed; empty when converted.
        shape: (N, K).
        bytes_before: Bytes of the dense weight.
        bytes_after: Bytes of the packed weight; ``bytes_before`` unless converted.
        relative_error: Frobenius norm of the quantisation error over that of the weight; None unless converted.
        backend: Who serves it; None unless converted.
    """

    name: str
    action: str
    reason: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    relative_error: float | None = None
    backend: str | None = None


@attrs.frozen
class ConversionTable:
    """One row per linear layer, in the order of the model."""

    rows: tuple[Conversion, ...] = attrs.field(converter=tuple[Conversion, ...])

    @property
    def converted(self) -> tuple[Conversion, ...]:
        """The rows of converted layers."""
        return tuple(row for row in self.rows if row.action == "converted")

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, texts and numbers, ready for JSON."""
        return {"layers": [attrs.asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        """Return the table as text."""
        width = max([len(row.name) for row in self.rows], default=0)
        lines = []
        for row in self.rows:
            size = f"{row.shape[0]}×{row.shape[1]}"
            if row.action == "converted":
                tail = f"{row.bytes_before:>12,} → {row.bytes_after:>11,} B"
                tail += f"  error {row.relative_error:.4f}  {row.backend}"
            else:
                tail = row.reason
            lines.append(f"{row.name:<{width}}  {row.action:<9}  {size:>13}  {tail}")
        before = sum(row.bytes_before for row in self.rows)
        after = sum(row.bytes_after for row in self.rows)
        lines.append(f"{len(self.converted)} of {len(self.rows)} converted, {before:,} → {after:,} bytes")
        return "\n".join(lines)
