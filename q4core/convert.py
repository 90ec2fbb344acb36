"""``convert_linears_``: quantise the linear layers of any ``nn.Module``, in place."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4core.codec import dequantize, quantize
from q4core.errors import InputError, Q4Error
from q4core.session import Session, default_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from q4core.formats import Format

__all__ = ["Conversion", "ConversionTable", "convert_linears_"]


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


def _rows(items: Iterable[Conversion]) -> tuple[Conversion, ...]:
    return tuple(items)


@attrs.frozen
class ConversionTable:
    """One row per linear layer, in the order of the model."""

    rows: tuple[Conversion, ...] = attrs.field(converter=_rows)

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
                tail = (
                    f"{row.bytes_before:>12,} → {row.bytes_after:>11,} B  error {row.relative_error:.4f}  {row.backend}"
                )
            else:
                tail = row.reason
            lines.append(f"{row.name:<{width}}  {row.action:<9}  {size:>13}  {tail}")
        before = sum(row.bytes_before for row in self.rows)
        after = sum(row.bytes_after for row in self.rows)
        lines.append(f"{len(self.converted)} of {len(self.rows)} converted, {before:,} → {after:,} bytes")
        return "\n".join(lines)


def convert_linears_(  # noqa: PLR0913  # one argument per wish
    model: nn.Module,
    *,
    format: str | Format,  # noqa: A002  # the contract's name
    skip: Sequence[str] | Callable[[str, nn.Linear], bool] = (),
    session: Session | None = None,
    block_size: int | None = None,
    strict: bool = False,
) -> ConversionTable:
    """Replace the ``nn.Linear`` layers of a model by ``Q4Linear`` ones, in place.

    A layer whose weight another module shares (a tied head) is skipped, because converting it would cut the tie. A
    layer that can't be converted stays as it is, with the reason in the table; nothing is half-converted.

    Args:
        model: Any module but an ``nn.Linear`` itself, which can't replace itself.
        format: Name of the format, or a ``Format``.
        skip: Names or glob patterns (matched against the full name and its last part), or a function of name and layer.
        session: Whose policy; the default session unless told.
        block_size: In-features per scale; the format's default unless told.
        strict: Raise at the first layer that can't be converted, before it is touched.

    Returns:
        A table of what was done.

    Raises:
        InputError: ``model`` is no module, or a bare ``nn.Linear``.
        Q4Error: With ``strict``, whatever made a layer impossible to convert.
    """
    if isinstance(model, nn.Linear) or not isinstance(model, nn.Module):
        raise InputError(
            "convert_linears_",
            name="model",
            rule="a module that contains nn.Linear layers",
            value=f"{type(model).__module__}.{type(model).__name__}",
            hint="Use session.linear(q4.quantize(layer.weight, format=…), layer.bias).",
        )
    owner = session or default_session()
    shared = _shared_parameters(model)
    rows = []
    for name, parent, attribute, layer in list(_linears(model)):
        reason = _skip_reason(name, layer, skip, shared)
        if reason is not None:
            rows.append(_row(name, layer, "skipped", reason))
            continue
        try:
            weight = quantize(layer.weight.detach(), format, block_size=block_size, name=name)
            replacement = owner.linear(weight, layer.bias, name=name)
        except Q4Error as error:
            if strict:
                raise
            rows.append(_row(name, layer, "failed", str(error)))
            continue
        replacement.train(layer.training)
        setattr(parent, attribute, replacement)
        dense = layer.weight.detach().to(torch.float32)
        error_norm = float(torch.linalg.vector_norm(dense - dequantize(weight, torch.float32)))
        norm = float(torch.linalg.vector_norm(dense))
        rows.append(
            attrs.evolve(
                _row(name, layer, "converted", ""),
                bytes_after=weight.nbytes,
                relative_error=error_norm / norm if norm else 0.0,
                backend=replacement.diagnostics().backend,
            )
        )
    return ConversionTable(rows)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    for parent_name, parent in model.named_modules():
        for attribute, child in parent.named_children():
            if type(child) is nn.Linear:
                yield f"{parent_name}.{attribute}" if parent_name else attribute, parent, attribute, child


def _shared_parameters(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}


def _skip_reason(
    name: str,
    layer: nn.Linear,
    skip: Sequence[str] | Callable[[str, nn.Linear], bool],
    shared: dict[int, list[str]],
) -> str | None:
    if callable(skip):
        if skip(name, layer):
            return "skipped by the caller's function"
    else:
        patterns = [skip] if isinstance(skip, str) else skip
        for pattern in patterns:
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition(".")[2], pattern):
                return f"matches {pattern!r}"
    if id(layer.weight) in shared:
        others = [owner for owner in shared[id(layer.weight)] if owner != f"{name}.weight"]
        return f"its weight is shared with {', '.join(others)}"
    return None


def _row(name: str, layer: nn.Linear, action: str, reason: str) -> Conversion:
    size = layer.weight.numel() * layer.weight.element_size()
    return Conversion(
        name=name,
        action=action,
        reason=reason,
        shape=(layer.out_features, layer.in_features),
        bytes_before=size,
        bytes_after=size,
    )
