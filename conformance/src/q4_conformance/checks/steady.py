"""Checks of a backend over many calls: the same bits each time, memory where it was, and a loss that falls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.checks.device import expect_same_bytes
from q4_conformance.checks.endurance import CALLS, STEPS, Adam, Growth, judge_ste, one_thread
from q4_conformance.checks.values import draw, judge_call
from q4_conformance.contract.case import check, expect
from q4_conformance.outcome import NotDeclaredError, NotTestableError
from q4_conformance.subjects.temporary_plugin import lent
from q4core import Feature, Request
from q4core import quantize as quantize_ref

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4core import PackedWeight

LOST_RESULTS = 1 / 2
"""The share of a result that may stay behind per call."""
LOST_PER_THREAD = 1 << 14
"""Bytes that may stay behind per thread: what the system and the interpreter keep of one that has ended."""
_MOST_ROWS, _STRETCHES, _THREADS = 601, 3, 300
_WARM = 10
"""One call in so many warms up, before memory is looked at."""
_CALL_LOOKS, _STEP_LOOKS = (tuple(range(total // _WARM, total, 3 * total // _WARM)) for total in (CALLS, STEPS))
"""Calls and steps at which memory is looked at, in three stretches of equal length to the end."""


@check("calls")
@one_thread()
def check_calls(case: Case, subject: BackendSubject) -> str:
    """10,000 calls of one layer: the same bits each time, and memory stays where it was."""
    weight = case.weight()
    layer = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    calls = [(x, layer(x).clone()) for x in (draw(case, layer, weight, rows, case.seeds[0]) for rows in case.rows)]
    for x, y in calls:
        judge_call(layer, weight, x, y)
    growth = Growth(subject.device)
    for call in range(CALLS):
        if call in _CALL_LOOKS:
            growth.look()
        x, y = calls[call % len(calls)]
        expect(torch.equal(layer.module(x), y), f"call {call}, M = {x.shape[0]}: other bits")
    growth.look()
    grown = growth.bytes
    least = min(y.nbytes for _, y in calls)
    limit = least * (CALLS - CALLS // _WARM) * LOST_RESULTS
    expect(grown < limit, f"memory grew by {grown} bytes in {CALLS} calls, {limit:.0f} at most")
    return f"{CALLS} calls, memory grew by {grown} bytes"


@check("varied_calls")
@one_thread()
def check_varied_calls(case: Case, subject: BackendSubject) -> str:
    """Numbers of rows that differ, and threads that come and go, leave nothing behind."""
    weight = case.weight()
    layer = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    x = draw(case, layer, weight, _MOST_ROWS, case.seeds[0])
    y = layer(x)
    judge_call(layer, weight, x, y)
    growth = Growth(subject.device)
    for stretch in range(_STRETCHES):
        growth.look()
        for rows in range(_MOST_ROWS - stretch - 1, 0, -_STRETCHES):
            layer(x[:rows])
    growth.look()
    limit = LOST_RESULTS * sum(y[:rows].nbytes for rows in range(1, _MOST_ROWS))
    told = f"memory grew by {growth.bytes} bytes in calls of {_MOST_ROWS - 1} numbers of rows"
    expect(growth.bytes < limit, f"{told}, {limit:.0f} at most")
    growth = Growth(subject.device)
    for _ in range(_STRETCHES):
        growth.look()
        for _ in range(_THREADS // _STRETCHES):
            _in_thread(lambda: layer(x[:17]))
    growth.look()
    limit = _THREADS * LOST_PER_THREAD
    expect(growth.bytes < limit, f"memory grew by {growth.bytes} bytes in {_THREADS} threads, {limit} at most")
    return f"{told}, by {growth.bytes} in {_THREADS} threads"


def _in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _quantising(subject: BackendSubject, wanted: PackedWeight) -> Request:
    """Return the request that asks a backend to quantise float32 to such a weight."""
    request = Request.for_weight(wanted, device=subject.device, dtype=torch.float32)
    return attrs.evolve(request, op="quantize", out_features=wanted.out_features, in_features=wanted.in_features)


@check("quantise_calls")
@one_thread()
def check_quantise_calls(case: Case, subject: BackendSubject) -> str:
    """10,000 calls of a backend's quantiser: the reference's bytes each time, and memory stays where it was."""
    if "quantize" not in subject.backend.capabilities.ops:
        raise NotDeclaredError("the op 'quantize' is not declared")
    kind = case.weight_recipe.format
    dense = torch.randn(4, 4 * kind.block_size, generator=torch.Generator().manual_seed(18)) * 0.1
    wanted = quantize_ref(dense, kind.name)
    request = _quantising(subject, wanted)
    subject.require_declared(request)
    subject.require_hardware(request)
    quantize: Any = subject.backend.quantize  # type: ignore[attr-defined]  # declared by op "quantize"
    master, size = dense.to(subject.device), sum(item.nbytes for _, item in wanted.tensors())
    growth = Growth(subject.device)
    for call in range(CALLS):
        if call in _CALL_LOOKS:
            growth.look()
        expect_same_bytes(quantize(master, request), wanted, f"call {call}")
    growth.look()
    grown = growth.bytes
    limit = size * (CALLS - CALLS // _WARM) * LOST_RESULTS
    expect(grown < limit, f"memory grew by {grown} bytes in {CALLS} calls, {limit:.0f} at most")
    return f"{CALLS} calls, memory grew by {grown} bytes"


@check("ste_native")
def check_ste_native(case: Case, subject: BackendSubject) -> str:
    """``linear_ste`` through the backend's own quantiser has the reference's weight and the analytic gradients."""
    if "quantize" not in subject.backend.capabilities.ops:
        raise NotDeclaredError("the op 'quantize' is not declared")
    if subject.device.type == "cpu":
        raise NotTestableError("on the CPU the core quantises masters by the reference; no other device is asked for")
    kind = case.weight_recipe.format
    subject.require_declared(_quantising(subject, quantize_ref(torch.ones(1, 2 * kind.block_size), kind.name)))
    with lent(subject.backend):
        judge_ste(kind.name, subject.device)
    return "y, x, master, bias"


@check("train_through")
@one_thread()
def check_train_through(case: Case, subject: BackendSubject) -> str:
    """1,000 steps of a plain training loop through a frozen layer: finite gradients, a falling loss, flat memory."""
    weight = case.weight()
    if Feature.GRADIENTS not in subject.backend.capabilities.features:
        raise NotDeclaredError("feature 'gradients' is not declared")
    layer = subject.layer(weight, dtype=case.dtype, precision=case.precision, gradients=True)
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(16, 8, generator=generator)
    target = torch.tanh(x @ torch.randn(8, 4, generator=generator) / 3).to(subject.device)
    before = torch.nn.Parameter((torch.randn(weight.in_features, 8, generator=generator) / 3).to(subject.device))
    after = torch.nn.Parameter((torch.randn(4, weight.out_features, generator=generator) / 9).to(subject.device))
    optimiser = Adam([before, after], 1e-2)
    x = x.to(subject.device)
    losses, growth = [], Growth(subject.device)
    for step in range(STEPS):
        if step in _STEP_LOOKS:
            growth.look()
        hidden = layer.module(torch.tanh(x @ before.T).to(case.dtype)).to(torch.float32)
        loss = torch.nn.functional.mse_loss(hidden @ after.T, target)
        optimiser.zero_grad()
        loss.backward()
        for name, parameter in (("before", before), ("after", after)):
            grad = parameter.grad
            right = grad is not None and bool(torch.isfinite(grad).all())
            expect(right, f"step {step}: the gradient of what stands {name} the layer is not finite")
        expect(bool(before.grad.any()), f"step {step}: no gradient came through the layer")  # type: ignore[union-attr]  # above
        optimiser.step()
        losses.append(float(loss.detach()))
    growth.look()
    grown = growth.bytes
    limit = x.shape[0] * weight.in_features * 4 * (STEPS - STEPS // _WARM) * LOST_RESULTS  # of a gradient
    expect(grown < limit, f"memory grew by {grown} bytes in {STEPS} steps, {limit:.0f} at most")
    head, tail = sum(losses[:20]) / 20, sum(losses[-20:]) / 20
    expect(tail < head / 2, f"the loss went from {head:.4g} to {tail:.4g}")
    return f"loss {head:.4g} to {tail:.4g}, memory grew by {grown} bytes"
