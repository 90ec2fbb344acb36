"""The self-probe of a backend's input gradient, against float64 of the source weight."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.backend import Reason, ReasonCode
from q4core.codec import decode_rows
from q4core.diagnostics.errors_of_plugins import note_fault
from q4core.errors import PLUGIN_FAULTS
from q4core.formats import same_bytes
from q4core.machine import on_device
from q4core.probes.error_bound import error_bound, worst_ratio
from q4core.probes.linear import CHUNK_ELEMENTS, DIFFERENT_ROWS, grid_activations, sampled
from q4core.probes.output import describe_wrong
from q4core.selection.probe_results import ProbeResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.backend import Backend, KernelPath, Prepared, Request
    from q4core.weight import PackedWeight

__all__ = ["probe_gradient"]


@attrs.define(eq=False)
class _Run:
    """One call: grad [D, N], of which row m % D is the m-th, and the sampled columns of the result [M, C].

    ``reference`` and ``magnitude`` [D, C] are what the result should be, and the sum of its products' sizes. All are in
    float64 but ``out``, which holds the result as the backend wrote it.
    """

    grad: torch.Tensor
    out: torch.Tensor
    reference: torch.Tensor
    magnitude: torch.Tensor

    def bound(self) -> torch.Tensor:
        """Return the largest error allowed in each element."""
        return error_bound(self.reference, self.magnitude, self.grad.shape[1], self.out.dtype)

    def worst(self) -> float:
        """Return the largest error over its bound; NaN where a result is not finite and should be."""
        bound = self.bound()
        worst = 0.0
        for part in self.out.to("cpu", torch.float64).split(len(self.grad)):
            m = len(part)
            ratio = worst_ratio(part, self.reference[:m], bound[:m], self.out.dtype)
            if not ratio <= worst:
                worst = ratio
            if ratio != ratio:  # noqa: PLR0124  # NaN is final
                break
        return worst


def probe_gradient(  # noqa: PLR0913  # the facts of one probe
    backend: Backend,
    prepared: Prepared,
    source: PackedWeight,
    request: Request,
    path: KernelPath,
    counts: Sequence[int],
) -> ProbeResult:
    """Run one input gradient with some numbers of rows and compare every (sampled) column with float64.

    The bound is that of ``linear`` with N for K: what is summed up are N products.

    Args:
        backend: Who computes.
        prepared: The weight in the backend's layout.
        source: The weight that it was prepared from, on any device.
        request: The request for gradients, as the backend sees it.
        path: Which path.
        counts: Numbers of rows to run it with.

    Returns:
        The result; its ``fault`` says what was wrong first.
    """
    started = time.perf_counter()
    computes: Any = backend  # ``input_gradient`` is declared by its op
    columns = sampled(request.in_features)
    runs: list[_Run] = []
    message = None
    for draw, count in enumerate(counts):
        draws = min(count, DIFFERENT_ROWS)
        different = grid_activations(draws, request.out_features, path.precision, dtype=request.out_dtype, seed=draw)
        grad = different[torch.arange(count) % draws].to(request.device)
        lent = grad.clone()
        out = torch.full((count, request.in_features), math.nan, dtype=request.dtype, device=request.device)
        try:
            with on_device(request.device):
                computes.input_gradient(prepared, lent, out, path=path.name)
        except PLUGIN_FAULTS as error:
            told = note_fault(backend.name, error)
            message = f"input gradient {path.name} raised {told} at M = {count}"
            break
        if not same_bytes(lent, grad):
            message = f"input gradient {path.name} wrote to grad at M = {count}"
            break
        zeros = torch.zeros((2, draws, columns.numel()), dtype=torch.float64)
        compared = out if columns.numel() == request.in_features else out[:, columns.to(request.device)]
        runs.append(_Run(different.to(torch.float64), compared, zeros[0], zeros[1]))
    _add_up(runs, source, columns)
    worst = 0.0
    for run in runs:
        ratio = run.worst()
        if not ratio <= 1.0:
            worst = ratio
            wrong = describe_wrong(run.out, run.reference, run.bound(), columns, "out")
            message = f"input gradient {path.name} computed wrong numbers at M = {len(run.out)}: {wrong}"
            break
        worst = max(worst, ratio)
    fault = None if message is None else Reason(ReasonCode.PROBE_FAILED, message)
    return ProbeResult(fault, worst, (time.perf_counter() - started) * 1e6)


def _add_up(runs: list[_Run], source: PackedWeight, columns: torch.Tensor) -> None:
    """Decode the weight once, chunk by chunk of out-features, and add each run's products with it."""
    there = columns.to(source.device)
    step = max(1, CHUNK_ELEMENTS // source.in_features)
    for rows in torch.arange(source.out_features).split(step):
        dense = decode_rows(source, rows, dtype=torch.float64)[:, there].to("cpu")
        for run in runs:
            part = run.grad[:, rows]
            run.reference += part @ dense
            run.magnitude += part.abs() @ dense.abs()
