"""``explain``: the packed and dense modules of a model, reasons, bytes and backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from torch import nn
from torch.nn.modules.conv import _ConvNd as _Conv

from q4core import InputError, PathKind, Q4Linear
from q4core.plugin_api import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core import Diagnostics

__all__ = ["Explanation", "Row", "explain"]

_MATRIX, _STACKED = 2, 3


@attrs.frozen(kw_only=True)
class Row:
    """One module that holds matrices.

    Args:
        name: Its name in the model.
        kind: Its format, or the class of a dense module.
        shape: Shape of the (largest) weight.
        bytes_before: Bytes of the weights as dense ones in the dtype in which the module runs.
        bytes_after: Bytes that they take.
        backend: Who runs it; None for a dense module.
        reason: Why it is dense, or runs by the reference; empty where a kernel runs it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    backend: str | None = None
    reason: str = ""


@attrs.frozen
class Explanation:
    """Every module with matrices, in the model's order, and what ran by programs; printed, a table."""

    rows: tuple[Row, ...]
    programs: tuple[str, ...] = ()
    """For each decoder how many calls ran by programs, and how many by modules for which reason."""

    @property
    def packed(self) -> tuple[Row, ...]:
        """The rows of packed modules."""
        return tuple(row for row in self.rows if row.backend is not None)

    @property
    def dense(self) -> tuple[Row, ...]:
        """The rows of dense modules."""
        return tuple(row for row in self.rows if row.backend is None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, texts and numbers, ready for JSON."""
        return {"modules": [attrs.asdict(row) for row in self.rows], "programs": list(self.programs)}

    def __str__(self) -> str:
        """Return the table as text."""
        width = max([len(row.name) for row in self.rows], default=0)
        kinds = max([len(row.kind) for row in self.rows], default=0)
        lines = []
        for row in self.rows:
            size = "×".join(map(str, row.shape))
            tail = ": ".join(filter(None, (row.backend or "dense", row.reason)))
            sizes = f"{row.bytes_before:>13,} → {row.bytes_after:>12,} B"
            lines.append(f"{row.name:<{width}}  {row.kind:<{kinds}}  {size:>13}  {sizes}  {tail}")
        before, after = (sum(getattr(row, name) for row in self.rows) for name in ("bytes_before", "bytes_after"))
        lines.append(f"{len(self.packed)} of {counted(len(self.rows), 'module')} packed, {before:,} → {after:,} bytes")
        return "\n".join([*lines, *self.programs])


def explain(model: nn.Module) -> Explanation:
    """Return what became of each module of a model that holds matrices.

    Args:
        model: A model that was loaded by q4core, or any other module.

    Raises:
        InputError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise InputError("explain", name="model", rule="an nn.Module", value=type(model).__name__)
    reasons = getattr(getattr(model, "hf_quantizer", None), "reasons", {})
    forwards = ((name, vars(module).get("forward")) for name, module in model.named_modules())
    lines = [line for name, found in forwards if hasattr(found, "report_lines") for line in found.report_lines(name)]
    return Explanation(tuple(_rows(model, reasons)), tuple(lines))


def _rows(model: nn.Module, reasons: dict[str, str]) -> Iterator[Row]:
    seen: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Q4Linear):
            if module.is_prepared:
                record = module.diagnostics()
                before = module.weight.numel() * module.dtype.itemsize
                yield Row(
                    name=name,
                    kind=record.format,
                    shape=record.shape,
                    bytes_before=before,
                    bytes_after=record.prepared_bytes,
                    backend=record.backend,
                    reason=_why_reference(record),
                )
            continue
        own = {key: item for key, item in module.named_parameters(recurse=False) if item.dim() >= _MATRIX}
        fresh = [item for item in own.values() if id(item) not in seen]
        if not own:
            continue
        shared = next((seen[id(item)] for item in own.values() if id(item) in seen), None)
        size = sum(item.numel() * item.element_size() for item in fresh)
        largest = max(own.values(), key=lambda item: item.numel())
        reason = f"its weight is {shared}'s" if shared is not None else reasons.get(name) or _reason(module)
        kind, shape = type(module).__name__, tuple(largest.shape)
        yield Row(name=name, kind=kind, shape=shape, bytes_before=size, bytes_after=size, reason=reason)
        seen |= {id(item): name for item in fresh}


def _why_reference(record: Diagnostics) -> str:
    """Return why each kernel does not run a layer that the reference runs; nothing for other layers."""
    if all(path.kind is not PathKind.REFERENCE for path in record.paths):
        return ""
    why = record.fallback_reason or "; ".join(f"not {rejection}" for rejection in record.rejections)
    return why or "no other backend is installed"


def _reason(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "stored so"
    weights = [item.dim() for item in module.parameters(recurse=False)]
    if _STACKED in weights and not isinstance(module, _Conv):
        return "matrices in one tensor, which the module calls in a way of its own"
    return "no linear layer"
