"""The self-probe of spikes: a backend's sparse product against float64, before its first use for a kind of weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from q4core.codec import decode_rows
from q4core.diagnostics.errors_of_plugins import note_fault
from q4core.errors import PLUGIN_FAULTS
from q4core.formats import same_bytes
from q4core.machine import on_device
from q4core.probes.comparison import describe_wrong, error_bound, worst_ratio
from q4core.probes.linear import CHUNK_ELEMENTS, sampled

if TYPE_CHECKING:
    from q4core.backend import Prepared
    from q4core.weight import PackedWeight

_RATES = (0.0, 0.02, 0.2, 1.0)
"""Share of ones in each row of the trial."""


def find_spike_fault(backend: Any, prepared: Prepared, source: PackedWeight) -> str | None:
    """Return what is wrong with a backend's sparse product of a weight, or None.

    Args:
        backend: Declares spikes.
        prepared: The weight in its layout.
        source: The same weight.
    """
    device, count = prepared.tensors[0].device, source.in_features
    random = torch.rand((len(_RATES), count), generator=torch.Generator().manual_seed(0x51), dtype=torch.float64)
    ones = random < torch.tensor(_RATES, dtype=torch.float64)[:, None]
    ones[1, [0, -1]] = True
    columns, starts = events_of(ones.to(device))
    given = columns.clone(), starts.clone()
    out = torch.full((len(_RATES), source.out_features), math.nan, dtype=torch.float32, device=device)
    try:
        with on_device(device):
            backend.spikes(prepared, columns, starts, out, bias=None)
    except PLUGIN_FAULTS as error:
        return f"spikes raised {note_fault(backend.name, error)}"
    if not all(map(same_bytes, given, (columns, starts))):
        return "spikes wrote to columns or starts"
    rows, x = sampled(source.out_features), ones.to(torch.float64)
    step = max(1, CHUNK_ELEMENTS // count)
    dense = [decode_rows(source, part, dtype=torch.float64).cpu() for part in rows.split(step)]
    reference = torch.cat([x @ part.T for part in dense], 1)
    magnitude = torch.cat([x @ part.abs().T for part in dense], 1)
    bound = error_bound(reference, magnitude, count, torch.float32)
    compared = out[:, rows.to(device)]
    if not worst_ratio(compared, reference, bound) <= 1.0:
        return f"spikes computed wrong numbers: {describe_wrong(compared, reference, bound, rows, 'y')}"
    return None


def events_of(ones: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns of the ones of a bool [M, K], row by row, and where each row's start, both int64."""
    columns = ones.nonzero()[:, 1].contiguous()
    starts = torch.zeros(len(ones) + 1, dtype=torch.int64, device=ones.device)
    torch.cumsum(ones.sum(1), 0, out=starts[1:])
    return columns, starts
