"""The table of a conversion: a row for each layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Conversion", "ConversionTable", "row_of", "table_of"]

_GATES = {"LSTM": 4, "GRU": 3}
_UNSIZED = nn.UninitializedParameter


@attrs.frozen(kw_only=True)
class Conversion:
    """The result for one layer.

    Args:
        name: Its name in the model.
        action: ``converted``, ``skipped`` or ``failed``.
        reason: Why it was skipped or failed, or as which layer it was converted under another name; else empty.
        shape: (N, K); of a recurrent layer, of its first matrix.
        bytes_before: Bytes of the dense weight; 0 under a further name of a layer, as it is there once.
        bytes_after: Bytes of the weight now; ``bytes_before`` unless it was packed.
        relative_error: Frobenius norm of the quantisation error over that of the weight; None unless
            ``convert_linears_`` made it.
        backend: The backend that runs it; None unless ``convert_linears_`` made it.
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
    """One row per layer, in the order of the model."""

    rows: tuple[Conversion, ...] = attrs.field(converter=tuple[Conversion, ...])

    @property
    def converted(self) -> tuple[Conversion, ...]:
        """The rows of converted layers."""
        return tuple(row for row in self.rows if row.action == "converted")

    @property
    def names(self) -> list[str]:
        """Names of the converted layers."""
        return [row.name for row in self.converted]

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
                tail = row.reason or f"{row.bytes_before:>12,} → {row.bytes_after:>11,} B"
                if row.relative_error is not None and not row.reason:
                    tail += f"  error {row.relative_error:.4f}  {row.backend}"
            else:
                tail = row.reason
            lines.append(f"{row.name:<{width}}  {row.action:<9}  {size:>13}  {tail}")
        before = sum(row.bytes_before for row in self.rows)
        after = sum(row.bytes_after for row in self.rows)
        lines.append(f"{len(self.converted)} of {len(self.rows)} converted, {before:,} → {after:,} bytes")
        return "\n".join(lines)


def table_of(named: Iterable[tuple[str, nn.Module]], rows: Mapping[nn.Module, Conversion]) -> ConversionTable:
    """Return a table of layers by all their names, from the row of each under its first one."""
    found = []
    for name, layer in named:
        first = rows[layer]
        reason = first.reason or f"the same layer as {first.name}"
        again = attrs.evolve(first, name=name, reason=reason, bytes_before=0, bytes_after=0)
        found.append(first if name == first.name else again)
    return ConversionTable(found)


def row_of(name: str, layer: nn.Module, action: str, reason: str = "", **found: Any) -> Conversion:
    """Return a layer's row; asking a parametrized one for its weight may change its state, so it is not asked."""
    named = [(part.rpartition(".")[2], item) for part, item in layer.named_parameters()]
    held = [item for leaf, item in named if not leaf.startswith("bias") and not isinstance(item, _UNSIZED)]
    size = sum(item.numel() * item.element_size() for item in held)
    sizes = {"shape": _shape(layer), "bytes_before": size, "bytes_after": size}
    return Conversion(name=name, action=action, reason=reason, **{**sizes, **found})


def _shape(layer: Any) -> tuple[int, int]:
    layer = getattr(layer, "inner", layer)
    if isinstance(layer, nn.RNNBase):
        return _GATES.get(layer.mode, 1) * layer.hidden_size, layer.input_size
    if isinstance(layer, nn.Conv2d):
        return layer.out_channels, layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    return layer.out_features, layer.in_features
