"""What a probe says of a result that is wrong; it runs only once a probe has failed."""

from __future__ import annotations

import math

import torch

from q4core.probes.error_bound import error_ratios

__all__ = ["describe_wrong"]


def describe_wrong(
    out: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, columns: torch.Tensor, name: str
) -> str:
    """Return what is wrong with a result: how many elements, and the worst of them with its exact value and bound.

    Args:
        out: What the backend wrote, [M, C] of its own dtype, on any device; NaN before.
        reference: Exact results [D, C] in float64; row m % D is the m-th.
        bound: The largest errors allowed, as ``reference``.
        columns: Which columns of the whole result the C are.
        name: What the result is called.
    """
    is_whole = int(columns[-1]) + 1 == columns.numel()
    elements = "elements" if is_whole else "compared elements"
    computed = out.to("cpu", torch.float64)
    repeated = torch.arange(len(computed)) % len(reference)
    reference, bound = reference[repeated], bound[repeated]
    blank = computed.isnan()
    if bool(blank.any()):
        row, column = blank.nonzero()[0].tolist()
        some = f"{int(blank.sum())} of {blank.numel()} {elements} not written, or NaN"
        return f"{some}, first {name}[{row}, {int(columns[column])}]; each element must be set, and not added to"
    ratios = error_ratios(computed, reference, bound, out.dtype).nan_to_num(nan=math.inf, posinf=math.inf)
    wrong = ratios > 1
    row, column = divmod(int(ratios.argmax()), ratios.shape[1])
    value, exact, allowed = (float(item[row, column]) for item in (computed, reference, bound))
    times = f" ({float(ratios[row, column]):.3g} × its bound)" if math.isfinite(value) else ""
    worst = f"{name}[{row}, {int(columns[column])}] = {value:.9g}, exact {exact:.9g} ± {allowed:.2g}{times}"
    count = int(wrong.sum())
    told = f"{count} of {wrong.numel()} {elements} {'is' if count == 1 else 'are'} wrong; worst {worst}"
    if not bool(torch.isfinite(computed[wrong]).all()):
        return f"output is not finite: {told}"
    return told if bool(computed.any()) else f"output is all zero: {told}"
