"""The numeric self-probe: a path may run only after it has computed right numbers on this machine.

Each path of ``linear`` and of ``input_gradient`` runs at the ends of the ranges of M that it serves, on activations
that lie exactly on its precision's grid, and on no coarser one, so that quantising them loses nothing unless a path
rounds more than it declares; from the 128th row on they repeat. Every output element is compared with float64 from the
*source* weight through the reference codec, within ``error_bound``.
"""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.backend import Precision
from q4core.codec import dequantize
from q4core.diagnostics.events import note_fault
from q4core.errors import PLUGIN_FAULTS, ConfigError
from q4core.formats import same_bytes
from q4core.machine.torch_state import on_device
from q4core.probes.comparison import describe_wrong, error_bound, probe_result, worst_ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4core.backend import Backend, KernelPath, Prepared, Request
    from q4core.selection.probe_results import ProbeResult
    from q4core.weight import PackedWeight

_ALL_ROWS = 1024
"""Weights of up to this many rows are compared whole; larger ones at both ends and at a stride between."""
_END_ROWS = 128
_STRIDED_ROWS = 256
_DIFFERENT_ROWS = 127
"""Of more rows of x the others repeat these, which bounds the work in float64; a prime number, so that no two rows that
lie alike in tiles are equal. Every row of y is compared."""
CHUNK_ELEMENTS = 1 << 20
"""Weights decoded to float64 at a time (8 MB)."""
_FP4_UNIT = -6
"""FP4 activations are E2M1 values times this power of two, where no static scale wants another."""
_BLOCK_SCALES = (-6, 8)
"""Powers of two that are normal e4m3 numbers."""
_POWERS = (-126, 126)


def _fp4_unit(activation_scale: float | None) -> float:
    """Return the power of two that E2M1 values are drawn under: one that block scales over a static scale reach."""
    if activation_scale is None or not (math.isfinite(activation_scale) and activation_scale > 0):
        return 2.0**_FP4_UNIT
    mantissa, exponent = math.frexp(activation_scale)
    above = exponent - 1 if mantissa == 0.5 else exponent  # noqa: PLR2004  # a power of two is the next one itself
    above = min(max(above, _POWERS[0]), _POWERS[1])
    return math.ldexp(1.0, above + min(max(_FP4_UNIT - above, _BLOCK_SCALES[0]), _BLOCK_SCALES[1]))


def grid_activations(  # noqa: PLR0913  # the facts of one draw
    rows: int,
    columns: int,
    precision: Precision,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    activation_scale: float | None = None,
) -> torch.Tensor:
    """Return activations that ``precision`` holds without loss, and no coarser one does.

    | precision | values | in every block |
    |---|---|---|
    | W4A4 | E2M1 values / 64; under a static scale that can't reach these, the nearest power of two it can | ±6 in 16 |
    | W4A8 | integers up to 127, / 64 | ±127 in 32 |
    | W4I16 | integers up to 16383, / 256, where ``dtype`` is float32 | ±16383 in 32 |
    | W4I16 | integers up to 129, of which 16383 is a multiple and 127 isn't, / 256, where it is not | ±129 in 32 |
    | W4A16 | integers up to 255, / 256: exact in bfloat16 and float16 | ±255 in 32 |
    | W4A32 | integers up to 65535, / 256, where ``dtype`` is float32; else as W4A16 | ±65535 in 32 |

    Args:
        rows: M.
        columns: K.
        precision: The path's precision.
        dtype: dtype of x.
        seed: Equal seeds give equal draws.
        activation_scale: The checkpoint's static scale, where the weight has one; only W4A4 uses it. A path takes its
            next power of two for what lies under the block scales.

    Returns:
        [rows, columns] of ``dtype`` on the CPU.

    Raises:
        ConfigError: ``dtype`` does not hold the values on the grid of ``activation_scale``.
    """
    generator = torch.Generator().manual_seed(0x51 + 7919 * seed + rows)
    if precision is Precision.W4A4:
        levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)
        values = levels[torch.randint(0, 8, (rows, columns), generator=generator)]
        block, peak, unit = 16, 6.0, _fp4_unit(activation_scale)
    else:
        is_wide = dtype is torch.float32
        if precision is Precision.W4I16:
            peak = 16383.0 if is_wide else 129.0
        elif precision is Precision.W4A8:
            peak = 127.0
        else:
            peak = 65535.0 if is_wide and precision is Precision.W4A32 else 255.0
        block, unit = 32, 2.0**-6 if precision is Precision.W4A8 else 2.0**-8
        values = torch.randint(0, int(peak) + 1, (rows, columns), generator=generator).to(torch.float32)
    starts = torch.arange(0, columns, block)
    lengths = torch.clamp(columns - starts, max=block)
    shifts = (torch.rand((rows, starts.numel()), dtype=torch.float32, generator=generator) * lengths).to(torch.int64)
    values.scatter_(1, starts + shifts, peak)
    signs = torch.randint(0, 2, (rows, columns), generator=generator).to(torch.float32) * 2 - 1
    scaled: torch.Tensor = values * signs * unit
    drawn = scaled.to(dtype)
    if activation_scale is not None and not torch.equal(drawn.to(torch.float32), scaled):
        rule = f"one under which {dtype} holds FP4 values"
        raise ConfigError("grid_activations", name="activation_scale", rule=rule, value=activation_scale)
    return drawn


def sampled(total: int) -> torch.Tensor:
    """Return which of ``total`` rows or columns are compared."""
    if total <= _ALL_ROWS:
        return torch.arange(total)
    middle = torch.linspace(_END_ROWS, total - _END_ROWS - 1, _STRIDED_ROWS, dtype=torch.float64).to(torch.int64)
    ends = (torch.arange(_END_ROWS), torch.arange(total - _END_ROWS, total))
    chosen: torch.Tensor = torch.unique(torch.cat((ends[0], middle, ends[1])))
    return chosen


@attrs.define(eq=False)
class _Run:
    """One call: what it was given, [D, ·] in float64, of which row m % D is the m-th, and the compared columns [M, C].

    ``reference`` and ``magnitude`` [D, C] are the exact results in float64, and the sums of their products' sizes.
    """

    given: torch.Tensor
    out: torch.Tensor
    reference: torch.Tensor
    magnitude: torch.Tensor


def probe_path(  # noqa: PLR0913  # the facts of one probe
    backend: Backend,
    prepared: Prepared,
    source: PackedWeight,
    request: Request,
    path: KernelPath,
    counts: Sequence[int],
    columns: torch.Tensor | None = None,
) -> ProbeResult:
    """Run one path with some numbers of rows and compare every element of the (sampled) columns with float64.

    The request's ``op`` says whether y or an input gradient is computed; the result's ``fault`` what was wrong first.
    ``columns`` are the out-features that are the source's rows, where it has not all of them.
    """
    started = time.perf_counter()
    computes: Any = backend  # ``input_gradient`` is declared by its op
    is_gradient = request.op == "input_gradient"
    if is_gradient:
        what, call, given, result = f"input gradient {path.name}", computes.input_gradient, "grad", "out"
        width, dtype = request.in_features, request.dtype
    else:
        what, call, given, result = f"path {path.name}", functools.partial(computes.linear, bias=None), "x", "y"
        width, dtype = request.out_features, request.out_dtype
    rows_of = sampled(width) if columns is None else torch.arange(columns.numel())
    columns = rows_of if columns is None else columns
    runs: list[_Run] = []
    message = None
    for draw, count in enumerate(counts):
        try:
            different = _activations(min(count, _DIFFERENT_ROWS), source, request, path, draw)
        except ConfigError as error:
            message = f"{what} can't be proven: {error}"
            break
        rows = different[torch.arange(count) % _DIFFERENT_ROWS].to(request.device)
        passed = rows.clone()
        out = torch.full((count, width), math.nan, dtype=dtype, device=request.device)
        address = out.data_ptr()
        try:
            with on_device(request.device):
                call(prepared, passed, out, path=path.name)
        except PLUGIN_FAULTS as error:
            message = f"{what} raised {note_fault(backend.name, error)} at M = {count}"
            break
        if not same_bytes(passed, rows):
            message = f"{what} wrote to {given} at M = {count}"
            break
        if out.shape != (count, width) or out.data_ptr() != address:
            message = f"{what} resized or replaced out at M = {count}"
            break
        compared = out if columns.numel() == width else out[:, columns.to(request.device)]
        zeros = torch.zeros((2, len(different), columns.numel()), dtype=torch.float64)
        runs.append(_Run(different.to(torch.float64), compared, *zeros))
    if path.codebook is not None and not is_gradient:
        source = attrs.evolve(source, codebook=torch.tensor(path.codebook, dtype=torch.float32, device=source.device))
    _add_up(runs, source, rows_of, is_gradient=is_gradient)
    worst = 0.0
    for run in runs:
        bound = error_bound(run.reference, run.magnitude, run.given.shape[1], dtype)
        ratio = worst_ratio(run.out, run.reference, bound)
        if not ratio <= 1.0:
            worst = ratio
            wrong = describe_wrong(run.out, run.reference, bound, columns, result)
            message = f"{what} computed wrong numbers at M = {len(run.out)}: {wrong}"
            break
        worst = max(worst, ratio)
    return probe_result(message, started, worst)


def find_product_fault(x: torch.Tensor, out: torch.Tensor, weight: PackedWeight) -> str | None:
    """Return what is wrong with ``out = x @ wᵀ``, or None: float64 decides, for the out-features that probes compare.

    Args:
        x: [M, K] of few rows.
        out: [M, N] that was computed; its dtype says how results are rounded.
        weight: w, [N, K].
    """
    columns = sampled(weight.out_features)
    exact = torch.zeros((2, len(x), columns.numel()), dtype=torch.float64)
    run = _Run(x.to("cpu", torch.float64), out[:, columns.to(out.device)], *exact)
    _add_up([run], weight, columns, is_gradient=False)
    bound = error_bound(run.reference, run.magnitude, weight.in_features, out.dtype)
    if worst_ratio(run.out, run.reference, bound) <= 1.0:
        return None
    return describe_wrong(run.out, run.reference, bound, columns, "y")


def _activations(count: int, source: PackedWeight, request: Request, path: KernelPath, draw: int) -> torch.Tensor:
    """Return activations that a path rounds without loss, also where it permutes or scales them first.

    Once scaled by channel, a block of several values is on no grid any more; a block of one value always is, so one
    value of each block stays.
    """
    precision = path.precision
    if request.op == "input_gradient":
        return grid_activations(count, request.out_features, precision, dtype=request.out_dtype, seed=draw)
    scale = None if source.activation_scale is None else float(source.activation_scale)
    dtype = request.dtype
    x = grid_activations(count, request.in_features, precision, dtype=dtype, seed=draw, activation_scale=scale)
    if precision.is_exact:
        return x
    if source.input_channel_scale is not None:
        block = 16 if precision is Precision.W4A4 else 32
        columns, row = torch.arange(x.shape[1]), torch.arange(count)[:, None]
        left = (columns // block * block + (columns // block + draw + row) % block).clamp(max=x.shape[1] - 1)
        x = torch.where(columns == left, torch.where(x == 0, x.abs().max(), x), 0)
    if source.input_permutation is not None:
        x = torch.empty_like(x).index_copy_(1, source.input_permutation.to("cpu"), x)
    return x


def _add_up(runs: list[_Run], source: PackedWeight, columns: torch.Tensor, *, is_gradient: bool) -> None:
    """Compute what each run should have given, with every chunk of the weight's out-features decoded once."""
    features = torch.arange(source.out_features) if is_gradient else columns
    step = max(1, CHUNK_ELEMENTS // source.in_features)
    everything = slice(None)
    for start in range(0, features.numel(), step):
        chunk = slice(start, start + step)
        dense = dequantize(source, torch.float64, rows=features[chunk])
        dense = (dense[:, columns.to(dense.device)] if is_gradient else dense.T).to("cpu")
        summed, written = (chunk, everything) if is_gradient else (everything, chunk)
        for run in runs:
            part = run.given[:, summed]
            run.reference[:, written] += part @ dense
            run.magnitude[:, written] += part.abs() @ dense.abs()
