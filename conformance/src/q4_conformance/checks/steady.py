"""Checks of a backend over many calls: the same bits each time, memory where it was, and a loss that falls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from q4_conformance.checks.device import expect_same_bytes, quantiser_of
from q4_conformance.checks.endurance import CALLS, Growth, judge_ste, threads, train
from q4_conformance.checks.values import draw, judged_calls
from q4_conformance.contract.case import check, expect
from q4_conformance.outcome import NotTestableError
from q4_conformance.subjects.temporary_plugin import lent
from q4core import quantize as quantize_ref

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject

LOST_RESULTS = 1 / 2
"""The share of a result that may leak per call."""
LOST_PER_THREAD = 1 << 14
"""Bytes that may leak per thread: what the system and the interpreter keep of one that has ended."""
_ROWS, _THREADS = 600, 300
_MIXED = 211
"""Has no divisor in common with the number of rows: each number comes once, and small ones follow large ones."""


@check("calls")
@threads(1)
def _check_calls(case: Case, subject: BackendSubject) -> str:
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    calls = judged_calls(layer, [draw(case, layer, rows) for rows in case.rows])
    growth = Growth(subject.device)
    for call in growth.over(CALLS):
        x, y = calls[call % len(calls)]
        expect(torch.equal(layer.module(x), y), f"call {call}, M = {x.shape[0]}: other bits")
    return growth.expect_flat(CALLS, min(y.nbytes for _, y in calls) * LOST_RESULTS, "calls")


@check("varied_calls")
@threads(1)
def _check_varied_calls(case: Case, subject: BackendSubject) -> str:
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    ((x, y),) = judged_calls(layer, [draw(case, layer, _ROWS)])
    growth = Growth(subject.device)
    for turn in growth.over(_ROWS):
        layer(x[: 1 + turn * _MIXED % _ROWS])
    lost = LOST_RESULTS * y.nbytes / 2  # of what the mean number of rows gives
    grown = growth.expect_flat(_ROWS, lost, "numbers of rows")
    growth = Growth(subject.device)
    for _ in growth.over(_THREADS):
        thread = threading.Thread(target=layer, args=(x[:17],))
        thread.start()
        thread.join()
    return f"{grown}; {growth.expect_flat(_THREADS, LOST_PER_THREAD, 'threads')}"


@check("quantise_calls")
@threads(1)
def _check_quantise_calls(case: Case, subject: BackendSubject) -> str:
    kind = case.weight_recipe.format
    dense = torch.randn(4, 4 * kind.block_size, generator=torch.Generator().manual_seed(18)) * 0.1
    wanted = quantize_ref(dense, kind.name)
    quantize = quantiser_of(subject, wanted, torch.float32)
    master, size = dense.to(subject.device), sum(item.nbytes for _, item in wanted.tensors())
    growth = Growth(subject.device)
    for call in growth.over(CALLS):
        expect_same_bytes(quantize(master), wanted, f"call {call}")
    return growth.expect_flat(CALLS, size * LOST_RESULTS, "calls")


@check("ste_native")
def _check_ste_native(case: Case, subject: BackendSubject) -> str:
    kind = case.weight_recipe.format
    quantiser_of(subject, quantize_ref(torch.ones(1, 2 * kind.block_size), kind.name), torch.float32)
    if subject.device.type == "cpu":
        raise NotTestableError("on the CPU the core quantises masters by the reference; no other device is asked for")
    with lent(subject.backend):
        judge_ste(kind.name, subject.device)
    return "y, x, master, bias"


@check("train_through")
@threads(1)
def _check_train_through(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    layer = subject.layer(weight, dtype=case.dtype, precision=case.precision, gradients=True)
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(16, 8, generator=generator)
    target = torch.tanh(x @ torch.randn(8, 4, generator=generator) / 3).to(subject.device)
    before = torch.nn.Parameter((torch.randn(weight.in_features, 8, generator=generator) / 3).to(subject.device))
    after = torch.nn.Parameter((torch.randn(4, weight.out_features, generator=generator) / 9).to(subject.device))
    x = x.to(subject.device)

    def loss_of() -> torch.Tensor:
        hidden = layer.module(torch.tanh(x @ before.T).to(case.dtype)).to(torch.float32)
        return torch.nn.functional.mse_loss(hidden @ after.T, target)

    lost = x.shape[0] * weight.in_features * 4 * LOST_RESULTS  # of a gradient
    parameters = {"what is before the layer": before, "what is after the layer": after}
    return train(parameters, loss_of, subject.device, lost)
