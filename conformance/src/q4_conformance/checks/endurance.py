"""Checks over many calls: quantising and training."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from q4_conformance.contract.case import check, expect
from q4_conformance.measurement.allocations import status_bytes, trim
from q4_conformance.oracle.compare import judge
from q4_conformance.oracle.decoding import stored_bytes
from q4_conformance.oracle.exact import Reference, exact_weight
from q4_conformance.outcome import FailureError, NotTestableError
from q4core import BUILTIN_FORMATS, dequantize, quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from q4_conformance.contract.case import Case
    from q4core import PackedWeight

CALLS = 10_000
STEPS = 1_000
_CPU = torch.device("cpu")
_WITH_RULES = tuple(name for name, kind in BUILTIN_FORMATS.items() if kind.rule)
"""Formats that something quantises to."""
_RATE = 1e-3


def held_bytes(device: torch.device) -> int:
    """Return the memory that this process holds: tensors on a CUDA device, else what is resident."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    trim()
    resident = status_bytes().get("VmRSS")
    if resident is None:
        raise FailureError("resident memory can't be read from /proc/self/status")
    return resident


class Growth:
    """Memory looked at between stretches of equal work.

    What the work loses grows in each stretch; what else the process takes once does not. So the least growth of a
    stretch counts, for each of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: list[int] = []

    def look(self) -> None:
        """Note what is held now."""
        self._held.append(held_bytes(self._device))

    def over(self, turns: int) -> Iterator[int]:
        """Yield the number of each turn; memory is looked at between three stretches, after a tenth of warming up."""
        looks = range(turns // 10, turns, 3 * turns // 10)
        for turn in range(turns):
            if turn in looks:
                self.look()
            yield turn
        self.look()

    def expect_flat(self, turns: int, lost_bytes: float, what: str = "turns") -> str:
        """Return by how much memory grew; ``lost_bytes`` for each turn after the first tenth are too many."""
        limit = int(lost_bytes * (turns - turns // 10))
        grown = f"memory grew by {self.bytes} bytes in {turns} {what}"
        expect(self.bytes < limit, f"{grown}, {limit} at most")
        return grown

    @property
    def bytes(self) -> int:
        """What the work lost, over all stretches."""
        least = min(later - earlier for earlier, later in itertools.pairwise(self._held))
        return least * (len(self._held) - 1)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads; over small tensors several only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _bits(weight: PackedWeight) -> bytes:
    return b"".join(stored_bytes(tensor) for _, tensor in weight.tensors())


@check("quantise_often")
@threads(1)
def _check_quantise_often(_case: Case, _subject: object) -> str:
    names = sorted(_WITH_RULES)
    dense = torch.randn(4, 256, generator=torch.Generator().manual_seed(18)) * 0.1
    expected = {}
    for name in names:
        weight = quantize(dense, name)
        values = dequantize(weight, torch.float32)
        expect(bool(torch.isfinite(values).all()), f"{name}: not finite")
        exact = torch.from_numpy(exact_weight(weight)).to(torch.float32)
        expect(torch.equal(values, exact), f"{name}: dequantised to other numbers than its bytes mean")
        expected[name] = (_bits(weight), values)
    growth = Growth(_CPU)
    for call in growth.over(CALLS):
        name = names[call % len(names)]
        bits, values = expected[name]
        weight = quantize(dense, name)
        expect(_bits(weight) == bits, f"{name}, call {call}: other bytes")
        expect(torch.equal(dequantize(weight, torch.float32), values), f"{name}, call {call}: other numbers")
    grown = growth.expect_flat(CALLS, max(len(bits) for bits, _ in expected.values()) / 10)  # of a packed weight
    return f"{len(names)} formats, {grown}"


def _product(
    left: NDArray[np.float64], right: NDArray[np.float64], added: NDArray[np.float64] | None = None
) -> Reference:
    """Return the exact ``left @ right + added``, ready to be judged."""
    value, size = left @ right, np.abs(left) @ np.abs(right)
    if added is not None:
        value, size = value + added, size + np.abs(added)
    underflow = (1 + np.abs(left)).sum(axis=-1, keepdims=True) * (1 + np.abs(right).max())
    return Reference(value=value, size=size, underflow=underflow, is_zero=size == 0, steps=left.shape[-1] + 8)


def straight_through() -> Any:
    """Return the package that offers ``linear_ste``: q4-nn, found by its entry point, as subjects are."""
    for point in importlib.metadata.entry_points(group="q4core.plugins", name="nn"):
        return point.load()
    raise NotTestableError("linear_ste is a part of q4-nn, which is not installed; `pip install q4-nn`")


@check("ste_gradients")
def _check_ste_gradients(_case: Case, _subject: object) -> str:
    for name in sorted(_WITH_RULES):
        judge_ste(name, torch.device("cpu"))
    return f"{len(_WITH_RULES)} formats: y, x, master, bias"


def judge_ste(name: str, device: torch.device) -> None:
    """Judge ``linear_ste`` in one format on one device: the quantised weight, and the analytic gradients."""
    generator = torch.Generator().manual_seed(19)
    draws = (torch.randn(*shape, generator=generator) for shape in ((24, 128), (5, 128), (24,)))
    master, x, bias = (item.mul(0.2).to(device).requires_grad_() for item in draws)
    grad = torch.randn(5, 24, generator=generator).to(device)
    dense = exact_weight(quantize(master.detach().cpu(), name))
    training = straight_through()
    seen = training.ste_weight(master, name)
    expect(torch.equal(seen.detach().cpu(), torch.from_numpy(dense).to(torch.float32)), f"{name}: another weight")
    y = training.linear_ste(x, master, bias, format=name)
    y.backward(grad)
    inputs, outer, added = (item.detach().to("cpu", torch.float64).numpy() for item in (x, grad, bias))
    analytic = {
        "y": (y.detach(), _product(inputs, dense.T, added)),
        "x": (x.grad, _product(outer, dense)),
        "master": (master.grad, _product(outer.T, inputs)),
        "bias": (bias.grad, _product(np.ones((1, 5)), outer)),
    }
    for what, (got, reference) in analytic.items():
        if got is None:
            raise FailureError(f"{name}: no gradient of {what}")
        verdict = judge(got.reshape(reference.value.shape), reference, out_dtype=torch.float32)
        expect(verdict.passed, f"{name}, {what}: {verdict}")
        expect(bool(got.any()), f"{name}: the gradient of {what} is zero")


@check("train_long")
@threads(1)
def _check_train_long(_case: Case, _subject: object) -> str:
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(64, 64, generator=generator)
    target = torch.tanh(x @ torch.randn(64, 16, generator=generator) / 8)
    first = torch.nn.Parameter(torch.randn(64, 64, generator=generator) / 8)
    second = torch.nn.Parameter(torch.randn(16, 64, generator=generator) / 8)
    bias = torch.nn.Parameter(torch.zeros(16))
    training = straight_through()

    def loss_of() -> torch.Tensor:
        hidden = torch.relu(training.linear_ste(x, first, format="nvfp4"))
        return torch.nn.functional.mse_loss(training.linear_ste(hidden, second, bias, format="nf4"), target)

    return train({"first": first, "second": second, "bias": bias}, loss_of, _CPU, first.nbytes / 10)


def train(
    parameters: dict[str, torch.nn.Parameter],
    loss_of: Callable[[], torch.Tensor],
    device: torch.device,
    lost_bytes: float,
) -> str:
    """Take 1,000 steps against the signs of the gradients, finite and not zero; return how loss and memory went.

    Torch's own optimisers load its compiler first, which takes seconds and is not judged.
    """
    losses, growth = [], Growth(device)
    for step in growth.over(STEPS):
        losses.append(take_step(parameters, loss_of, f"step {step}"))
        zero = [name for name, item in parameters.items() if item.grad is None or not item.grad.any()]
        expect(not zero, f"step {step}: the gradient of {', '.join(zero)} is zero")
    grown = growth.expect_flat(STEPS, lost_bytes)
    head, tail = sum(losses[:50]) / 50, sum(losses[-50:]) / 50
    expect(tail < head / 2, f"the loss went from {head:.4g} to {tail:.4g}")
    return f"loss {head:.4g} to {tail:.4g}, {grown}"


def take_step(
    parameters: dict[str, torch.nn.Parameter], loss_of: Callable[[], torch.Tensor], where: str, *, rate: float = _RATE
) -> float:
    """Take a step against the signs of the gradients, which must be there and finite; return the loss."""
    for parameter in parameters.values():
        parameter.grad = None
    loss = loss_of()
    loss.backward()
    for name, parameter in parameters.items():
        grad = parameter.grad
        if grad is None or not bool(torch.isfinite(grad).all()):
            raise FailureError(f"{where}: the gradient of {name} is not finite")
        with torch.no_grad():
            parameter.sub_(rate * grad.sign())
    return float(loss.detach())
