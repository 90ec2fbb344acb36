"""Checks of dtypes: those of x and of y, and every pair of them that a backend serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_conformance.checks.values import draw, judge_call
from q4_conformance.contract.case import check, expect
from q4_conformance.oracle.compare import judge
from q4_conformance.oracle.exact import exact_linear
from q4_conformance.outcome import FailureError
from q4core import ReasonCode

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendLayer, BackendSubject

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@check("dtypes")
def check_dtypes(case: Case, subject: BackendSubject) -> str:
    """y has x's dtype, or the one that is asked for; other pairs are served rightly by the backend, or refused."""
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    for rows in case.rows:
        x = draw(case, layer, rows)
        y = layer(x)
        judge_call(layer, x, y)
        for dtype in _DTYPES:
            asked = layer.module(x, out_dtype=dtype)
            expect(asked.dtype is dtype, f"out_dtype={dtype} gave {asked.dtype}")
            expect(torch.equal(asked, y.to(dtype)), f"out_dtype={dtype} is not the result in {dtype}")
    declared = [item for item in _DTYPES if item in subject.backend.capabilities.dtypes and item != case.dtype]
    seen = [_check_pair(case, subject, layer, out_dtype) for out_dtype in declared]
    return "; ".join([f"{case.dtype} to {case.dtype}", *seen])


def _check_pair(case: Case, subject: BackendSubject, layer: BackendLayer, out_dtype: torch.dtype) -> str:
    """Judge what the backend itself writes to a result of another dtype, with one rounding; return what it said."""
    request = subject.request(layer.weight, dtype=case.dtype, out_dtype=out_dtype, precision=case.precision)
    what = f"{case.dtype} to {out_dtype}"
    verdict = subject.backend.check(request)
    if verdict.reasons:
        codes = {reason.code for reason in verdict.reasons}
        if codes != {ReasonCode.DTYPE}:
            told = "; ".join(str(reason) for reason in verdict.reasons)
            raise FailureError(f"{what} is declared, and refused for other reasons than the pair: {told}")
        return f"{what} refused"
    prepared = subject.prepare(layer.weight, request)
    for segment in subject.choose(request).segments:  # prepare was told of these, and of no others
        path, rows = segment.path, segment.low
        x = draw(case, layer, rows)
        out = torch.full((rows, layer.weight.out_features), torch.nan, dtype=out_dtype, device=layer.device)
        subject.backend.linear(prepared, x.clone(), out, bias=None, path=path.name)
        reference = exact_linear(layer.weight, x, codebook=path.codebook)
        judged = judge(out, reference, out_dtype=out_dtype, device=layer.device)
        expect(judged.passed, f"{what}, {path.name}, M = {rows}: {judged}")
    return f"{what} right"
