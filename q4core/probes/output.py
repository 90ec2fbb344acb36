"""What a probe gives a backend to write to, and what it says of a result that is wrong.

Everything here but ``blank_output`` runs only once a probe has failed.
"""

from __future__ import annotations

import math

import torch

from q4core.probes.error_bound import error_ratios

__all__ = ["blank_output", "describe_wrong"]

_BLANK = {
    torch.float32: (torch.int32, 0x7FD15134),
    torch.bfloat16: (torch.int16, 0x7FD1),
    torch.float16: (torch.int16, 0x7ED1),
}
"""A quiet NaN for each dtype that no arithmetic makes of numbers, so that what was not written is known by its bits."""


def blank_output(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [rows, columns] full of a NaN that computing does not make."""
    bits, pattern = _BLANK[dtype]
    return torch.full((rows, columns), pattern, dtype=bits, device=device).view(dtype)


def describe_wrong(
    out: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, columns: torch.Tensor, name: str
) -> str:
    """Return what is wrong with a result: how many elements, and the worst of them with its exact value and bound.

    Args:
        out: What the backend wrote, [M, C] of its own dtype, on any device.
        reference: Exact results [D, C] in float64; row m % D is the m-th.
        bound: The largest errors allowed, as ``reference``.
        columns: Which columns of the whole result the C are.
        name: What the result is called.
    """
    is_whole = int(columns[-1]) + 1 == columns.numel()
    elements = "elements" if is_whole else "compared elements"
    computed, blank = out.to("cpu", torch.float64), _is_blank(out)
    repeated = torch.arange(len(computed)) % len(reference)
    reference, bound = reference[repeated], bound[repeated]
    if bool(blank.any()):
        rule = "each element must be set, and not added to"
        if bool(blank.all()):
            return f"out was not written; {rule}"
        row, column = blank.nonzero()[0].tolist()
        verb = "was" if int(blank.sum()) == 1 else "were"
        some = f"{int(blank.sum())} of {blank.numel()} {elements} {verb} not written"
        return f"{some}, first {name}[{row}, {int(columns[column])}]; {rule}"
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


def _is_blank(out: torch.Tensor) -> torch.Tensor:
    bits, pattern = _BLANK[out.dtype]
    return (out.contiguous().view(bits) == pattern).to("cpu")
