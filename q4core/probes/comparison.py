"""The comparison of a result with the exact one, under the error that float32 arithmetic can make.

The bound follows from float32 arithmetic alone:

    |y - ref| <= gamma(K + 8) * sum_k |x_k| |w_k|  +  half an ulp of y's dtype

with gamma(n) = n u / (1 - n u), u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). K products and
sums, plus at most 8 roundings of scales, globals, offsets and bias.
"""

from __future__ import annotations

import math
import time

import torch

from q4core.backend import Reason, ReasonCode
from q4core.selection.probe_results import ProbeResult

_UNIT_ROUNDOFF = 2.0**-24
_HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def error_bound(reference: torch.Tensor, magnitude: torch.Tensor, columns: int, out_dtype: torch.dtype) -> torch.Tensor:
    """Return the largest error that float32 accumulation and one rounding to ``out_dtype`` can make.

    Args:
        reference: float64 exact results.
        magnitude: float64, the sum over k of |x_k| |w_k| (plus |bias|), shaped as ``reference``.
        columns: K.
        out_dtype: dtype that y is rounded to.
    """
    steps = (columns + 8) * _UNIT_ROUNDOFF
    accumulated: torch.Tensor = steps / (1 - steps) * magnitude
    rounded: torch.Tensor = (reference.abs() + accumulated) * _HALF_ULP[out_dtype] + _TINY[out_dtype]
    return accumulated + rounded


def _error_ratios(
    computed: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return each error over its bound, float64 throughout; NaN where a result is not finite and should be."""
    error = (computed - reference).abs()
    # Beyond the dtype's range an infinity of the right sign is right.
    beyond = reference.abs() + bound > torch.finfo(out_dtype).max
    error = torch.where(beyond & (computed == reference.sign() * torch.inf), 0.0, error)
    # A bound of zero (a block of zeros) allows no error at all.
    return torch.where(error == 0, 0.0, error / bound)


def worst_ratio(out: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest error over its bound, NaN where one is not finite; row m % D of ``reference`` is the m-th."""
    parts = out.to("cpu", torch.float64).split(len(reference))
    ratios = [_error_ratios(part, reference[: len(part)], bound[: len(part)], out.dtype).max() for part in parts]
    return float(torch.stack(ratios).max())


def describe_wrong(
    out: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, columns: torch.Tensor, name: str
) -> str:
    """Say how many elements of a result that held NaN before are wrong, and which is worst; ``columns`` are its C."""
    elements = "elements" if int(columns[-1]) + 1 == columns.numel() else "compared elements"
    computed = out.to("cpu", torch.float64)
    repeated = torch.arange(len(computed)) % len(reference)
    reference, bound = reference[repeated], bound[repeated]
    blank = computed.isnan()
    if bool(blank.any()):
        row, column = blank.nonzero()[0].tolist()
        some = f"{int(blank.sum())} of {blank.numel()} {elements} not written, or NaN"
        return f"{some}, first {name}[{row}, {int(columns[column])}]; each element must be set, and not added to"
    ratios = _error_ratios(computed, reference, bound, out.dtype).nan_to_num(nan=math.inf, posinf=math.inf)
    wrong = ratios > 1
    row, column = divmod(int(ratios.argmax()), ratios.shape[1])
    value, exact, allowed = (float(item[row, column]) for item in (computed, reference, bound))
    times = f" ({float(ratios[row, column]):.3g} × its bound)" if math.isfinite(value) else ""
    worst = f"{name}[{row}, {int(columns[column])}] = {value:.9g}, exact {exact:.9g} ± {allowed:.2g}{times}"
    count = int(wrong.sum())
    text = f"{count} of {wrong.numel()} {elements} {'is' if count == 1 else 'are'} wrong; worst {worst}"
    if not bool(torch.isfinite(computed[wrong]).all()):
        return f"output is not finite: {text}"
    return text if bool(computed.any()) else f"output is all zero: {text}"


def probe_result(message: str | None, started: float, worst: float | None = None) -> ProbeResult:
    """Return the result of a probe that began at ``started``; ``message`` says what was wrong first."""
    fault = None if message is None else Reason(ReasonCode.PROBE_FAILED, message)
    worst = worst if worst is not None else 0.0 if fault is None else math.inf
    return ProbeResult(fault, worst, (time.perf_counter() - started) * 1e6)
