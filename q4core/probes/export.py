"""The self-probe of a backend's ``export``: it gives the source's values back, whole and by rows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from q4core.codec import dequantize
from q4core.diagnostics.events import note_fault
from q4core.errors import PLUGIN_FAULTS
from q4core.formats import BlockOrder
from q4core.probes.comparison import probe_result
from q4core.probes.linear import CHUNK_ELEMENTS, sampled
from q4core.selection.plan import exported_weight

if TYPE_CHECKING:
    from q4core.backend import Backend, Prepared
    from q4core.selection.probe_results import ProbeResult
    from q4core.weight import PackedWeight


def probe_export(backend: Backend, prepared: Prepared, source: PackedWeight) -> ProbeResult:
    """Compare what a backend exports, whole and by rows, with the source, value by value."""
    started = time.perf_counter()
    rows = sampled(source.out_features)
    some = torch.tensor([source.out_features - 1, 0], dtype=torch.int64, device=source.device)
    given = some.clone()
    message = None
    try:
        difference = _difference(exported_weight(backend, prepared, None, source.shape), rows, source, rows)
        if difference is not None:
            message = f"export is not the inverse of prepare: {difference}"
        elif source.blocks is BlockOrder.ROW:
            weight = exported_weight(backend, prepared, given, source.shape)
            difference = _difference(weight, torch.arange(2), source, some)
            if not torch.equal(given, some):
                message = "export wrote to rows"
            elif difference is not None:
                message = f"export of rows {some.tolist()} gives other values than those rows have: {difference}"
    except PLUGIN_FAULTS as error:
        message = f"export raised {note_fault(backend.name, error)}"
    return probe_result(message, started)


def _difference(weight: PackedWeight, rows: torch.Tensor, source: PackedWeight, its_rows: torch.Tensor) -> str | None:
    """Say where rows of a weight differ from rows of the source, or None."""
    if weight.format != source.format:
        return f"its format is {weight.format.name!r}, the source's {source.format.name!r}"
    step = max(1, CHUNK_ELEMENTS // source.in_features)
    for mine, theirs in zip(rows.split(step), its_rows.split(step), strict=True):
        values, exact = (
            dequantize(item, torch.float64, rows=part) for item, part in ((weight, mine), (source, theirs))
        )
        if not torch.equal(values, exact):
            row, column = (values != exact).nonzero()[0].tolist()
            value, right = float(values[row, column]), float(exact[row, column])
            return f"w[{int(mine[row])}, {column}] = {value:.9g}, the source's is {right:.9g}"
    for field in ("input_channel_scale", "input_permutation", "activation_scale"):
        own, given = getattr(weight, field), getattr(source, field)
        if (own is None) != (given is None) or (own is not None and not torch.equal(own, given)):
            return f"its {field} is not the source's"
    return None
