"""Checks of numbers: what comes out, against the oracle, element by element, in every dtype of x and of y."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.contract.case import check, expect
from q4_conformance.oracle.compare import judge, judge_noise
from q4_conformance.oracle.exact import exact_input_gradient, exact_linear
from q4_conformance.oracle.grids import draw_free, draw_on_grid
from q4_conformance.outcome import FailureError
from q4_conformance.subjects.backend import BackendLayer, BackendSubject
from q4core import BackendUnavailableError, InputError, ReasonCode, WeightError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.function import Layer, Subject

_MOST_DRAWS = 16
_ABOVE = 17
"""How far above the first M of a path it is met again: past any whole tile of 16 rows, by one."""
_MOST_ROWS = 4096
"""Paths that begin at more rows than this are left to benchmarks; the certificate lists them."""
_HALF_SHIFT = -8
"""Edge weights hold scales of 2^10: activations this much smaller keep float16 results in range."""


def make_bias(case: Case) -> torch.Tensor:
    """Return a bias [N] of the case's dtype, about as large as the results."""
    generator = torch.Generator().manual_seed(case.seeds[0])
    return (torch.randn(case.weight_recipe.n, generator=generator) * 2).to(case.dtype)


def rows_of(case: Case, layer: Layer) -> tuple[int, ...]:
    """Return the values of M of a case, and those at which the layer's further paths begin, and a little above."""
    if not isinstance(layer, BackendLayer):
        return case.rows
    further = layer.diagnostics().segments[1:]
    starts = {
        rows
        for segment in further
        for rows in (segment.low, segment.low + _ABOVE)
        if rows <= min(segment.high or _MOST_ROWS, _MOST_ROWS)
    }
    return (*case.rows, *sorted(starts - {*case.rows}))


def draw(case: Case, layer: Layer, rows: int, seed: int | None = None) -> torch.Tensor:
    """Return activations [rows, K] on the grid of the path that serves that many rows, on the layer's device."""
    weight, seed = layer.weight, case.seeds[0] if seed is None else seed
    shift = _HALF_SHIFT if case.dtype is torch.float16 and case.weight_recipe.has_edges else case.shift
    grid = layer.precision(rows)
    x = draw_on_grid(grid, rows, weight.in_features, dtype=case.dtype, seed=seed, weight=weight, shift=shift)
    return x.to(layer.device)


def draws(case: Case, layer: Layer) -> Iterator[torch.Tensor]:
    """Yield activations for each value of M, as ``rows_of`` gives them."""
    for rows in rows_of(case, layer):
        yield draw(case, layer, rows)


def judge_call(layer: Layer, x: torch.Tensor, y: torch.Tensor) -> tuple[float, np.ndarray]:
    """Judge one result; return its error over its bound, and which elements were blind.

    ``x`` is as it was drawn: the layer was lent a copy, so that one that writes to x is judged by what it was asked.
    """
    codebook = layer.codebook(x.shape[0])
    reference = exact_linear(layer.weight, x, layer.bias, codebook=codebook, roundings=layer.roundings)
    verdict = judge(y, reference, out_dtype=x.dtype, device=layer.device)
    if not verdict.passed:
        raise FailureError(f"M = {x.shape[0]}: {verdict}")
    return verdict.ratio, verdict.blind


def judged_calls(layer: Layer, inputs: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Call a layer with each input, judge the results, and return them with their inputs."""
    calls = [(x, layer(x).clone()) for x in inputs]
    for x, y in calls:
        judge_call(layer, x, y)
    return calls


def expect_same_bits(
    layer: Callable[[torch.Tensor], torch.Tensor], calls: Iterable[tuple[torch.Tensor, torch.Tensor]], whose: str
) -> None:
    """Raise ``FailureError`` where a layer gives other bits for an input than the result next to it."""
    for x, y in calls:
        got = layer(x)
        expect(got.dtype is y.dtype and torch.equal(got, y), f"M = {x.shape[0]}: other bits from {whose}")


def _sweep(case: Case, layer: Layer) -> str:
    """Judge each M, drawing until every element has been seen."""
    worst, elements, count = 0.0, 0, 0
    further = range(case.seeds[-1] + 1, case.seeds[-1] + 1 + _MOST_DRAWS - len(case.seeds))
    for rows in rows_of(case, layer):
        unseen: np.ndarray | None = None
        for turn, seed in enumerate((*case.seeds, *further), start=1):
            x = draw(case, layer, rows, seed)
            ratio, blind = judge_call(layer, x, layer(x.clone()))
            worst, elements, count = max(worst, ratio), elements + blind.size, count + 1
            unseen = blind if unseen is None else unseen & blind
            if turn >= len(case.seeds) and not unseen.any():
                break
        if unseen is not None and unseen.any():
            raise FailureError(f"M = {rows}: {int(unseen.sum())} elements within their bound of zero in {count} draws")
    return f"{elements} elements in {count} draws, worst error {worst:.3g} of its bound"


@check("values")
def check_values(case: Case, subject: Subject) -> str:
    """Every element of every draw lies within the bound."""
    return _sweep(case, subject.layer(case.weight(), dtype=case.dtype, precision=case.precision))


@check("bias")
def _check_bias(case: Case, subject: Subject) -> str:
    weight = case.weight()
    bias = make_bias(case)
    odd = torch.cat((bias.new_full((1,), torch.nan), bias))[1:]
    seen = ""
    for placed in (bias, odd):
        layer = subject.layer(weight, placed, dtype=case.dtype, precision=case.precision)
        seen = _sweep(case, layer)
    return seen


@check("zero_inputs")
def _check_zero_inputs(case: Case, subject: Subject) -> str:
    layer = subject.layer(case.weight(), make_bias(case), dtype=case.dtype, precision=case.precision)
    outputs, inputs = layer.weight.shape
    for x in draws(case, layer):
        rows = x.shape[0]
        x[-1] = 0
        x[: rows // 2, inputs // 2 :] = 0
        if subject.has_out:
            out = torch.full((rows, outputs), torch.nan, dtype=case.dtype, device=layer.device)
            judge_call(layer, x, layer(x, out=out))
        judge_call(layer, x, layer(x.clone()))
    return "rows and blocks of zeros"


_SHAPE_REASONS = frozenset({ReasonCode.SHAPE, ReasonCode.ALIGNMENT, ReasonCode.POLICY})


@check("awkward")
def check_awkward(case: Case, subject: Subject) -> str:
    """Awkward shapes and addresses are refused with a typed reason, or computed right."""
    weight = case.weight()
    try:
        layer = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    except FailureError as error:
        cause = error.__cause__
        if isinstance(cause, BackendUnavailableError):
            codes = {reason.code for item in cause.rejections for reason in item.reasons}
            if codes <= _SHAPE_REASONS and codes != {ReasonCode.POLICY}:
                return f"refused: {cause}"
        raise  # for wrong numbers, or a broken plugin
    except (WeightError, InputError) as error:
        return f"refused: {error}"
    return _sweep(case, layer)


@check("gradient")
def _check_gradient(case: Case, subject: Subject) -> str:
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision, gradients=True)
    whose = _whose_gradient(layer, subject)
    worst = 0.0
    for drawn in draws(case, layer):
        rows, x = drawn.shape[0], drawn.clone().requires_grad_()
        y = layer(x)
        judge_call(layer, drawn, y.detach())
        expect(y.requires_grad, f"M = {rows}: the result does not require gradients")
        grad = (torch.randint(-64, 65, y.shape, generator=torch.Generator().manual_seed(rows)) / 16).to(case.dtype)
        y.backward(grad.to(layer.device))
        if x.grad is None:
            raise FailureError(f"M = {rows}: no gradient arrived")
        reference = exact_input_gradient(layer.weight, grad, roundings=layer.roundings)
        verdict = judge(x.grad, reference, out_dtype=case.dtype, device=layer.device)
        expect(verdict.passed, f"M = {rows}, gradient: {verdict}")
        worst = max(worst, verdict.ratio)
    return f"{whose}; worst error {worst:.3g} of its bound"


def _whose_gradient(layer: Layer, subject: Subject) -> str:
    """Return who computes the gradient; a backend that declares that it does, and was found broken, fails."""
    if not isinstance(subject, BackendSubject) or not isinstance(layer, BackendLayer):
        return "by the function"
    record = layer.diagnostics()
    broken = [reason for reason in record.gradients_refused if reason.code.domain == "build"]
    expect(not broken, f"the input gradient was declared, then left to the core: {'; '.join(map(str, broken))}")
    if record.gradients:
        return f"by {', '.join(segment.path.name for segment in record.gradients)}"
    return "; ".join(["by the core", *map(str, record.gradients_refused)])


@check("non_finite")
def _check_non_finite(case: Case, subject: Subject) -> str:
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    places = (layer.weight.in_features // 2, layer.weight.in_features - 1, 0)
    for index, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        # A single row has no other rows.
        for turn, rows in enumerate(filter(lambda rows: rows > 1, rows_of(case, layer))):
            x = draw(case, layer, rows)
            x[1, places[(index + turn) % len(places)]] = value
            y = layer(x.clone())
            finite = int(torch.isfinite(y[1]).sum())
            expect(finite == 0, f"M = {rows}: {value} in x gave {finite} finite numbers")
            others = [row for row in range(rows) if row != 1]
            reference = exact_linear(layer.weight, x[others], codebook=layer.codebook(rows), roundings=layer.roundings)
            verdict = judge(y[others], reference, out_dtype=case.dtype)
            expect(verdict.passed, f"M = {rows}, rows next to {value}: {verdict}")
    return "NaN and both infinities"


@check("noise")
def check_noise(case: Case, subject: Subject) -> str:
    """Free-range activations: the mean square error is what the precision's quantiser makes."""
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    worst = 0.0
    for rows in rows_of(case, layer):
        for seed in case.seeds:
            x = draw_free(rows, layer.weight.in_features, dtype=case.dtype, seed=seed).to(layer.device)
            facts: Any = {"codebook": layer.codebook(rows), "roundings": layer.roundings}
            y, precision = layer(x.clone()), layer.precision(rows)
            verdict = judge_noise(y, layer.weight, x, precision, out_dtype=case.dtype, **facts)
            expect(verdict.passed, f"M = {rows}: {verdict}")
            worst = max(worst, verdict.ratio)
    return f"worst mean square error {worst:.3g} of what is allowed"


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@check("dtypes")
def _check_dtypes(case: Case, subject: BackendSubject) -> str:
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
            reasons = "; ".join(str(reason) for reason in verdict.reasons)
            raise FailureError(f"{what} is declared, and refused for other reasons than the pair: {reasons}")
        return f"{what} refused"
    prepared = subject.prepare(layer.weight, request)
    for segment in subject.choose(request).segments:  # prepare was given these, and no others
        path, rows = segment.path, segment.low
        x = draw(case, layer, rows)
        out = torch.full((rows, layer.weight.out_features), torch.nan, dtype=out_dtype, device=layer.device)
        subject.backend.linear(prepared, x.clone(), out, bias=None, path=path.name)
        reference = exact_linear(layer.weight, x, codebook=path.codebook)
        judged = judge(out, reference, out_dtype=out_dtype, device=layer.device)
        expect(judged.passed, f"{what}, {path.name}, M = {rows}: {judged}")
    return f"{what} right"
