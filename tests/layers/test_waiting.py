"""Nothing in a call makes the host wait for the device: the reference's linear, its gradient, and the core's own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.fakes import registry
from tests.support.pretended import DEVICE, Pretence, pretended_cuda
from tests.support.samples import FLAT, FORMAT_KINDS, random_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OWN_TABLE = tuple(float(3 * code - 20) for code in range(16))
WEIGHTS: dict[str, Callable[[], q4.PackedWeight]] = {
    **{f"{name} {kind.value}": functools.partial(random_weight, name, 6, 128, kind) for name, kind in FORMAT_KINDS},
    "flat": lambda: random_weight("nf4", 7, 40, blocks=FLAT),
    "flat, double_quant": lambda: random_weight("nf4", 7, 40, q4.ScaleKind.DOUBLE_QUANT, blocks=FLAT),
    "zero points": lambda: attrs.evolve(random_weight("int4", 6, 128), zero=torch.full((6, 1), 5, dtype=torch.uint8)),
    "permuted": lambda: random_weight("nf4", 6, 128, input_permutation=torch.randperm(128)),
    "channel scale": lambda: random_weight("int4", 6, 128, input_channel_scale=torch.rand(128) + 1),
    "own codebook": lambda: random_weight("nf4", 6, 128, codebook=torch.tensor(OWN_TABLE)),
    "whole codebook": lambda: random_weight("nf4", 6, 128, codebook=torch.arange(16.0)),
    "tail": lambda: random_weight("nf4", 6, 100),
}


@pytest.fixture
def seen() -> Iterator[Pretence]:
    """What a pretended CUDA device saw."""
    with pretended_cuda() as pretence:
        yield pretence


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
def test_the_reference_waits_for_nothing(seen: Pretence, make: Callable[[], q4.PackedWeight]) -> None:
    """Neither a plain call nor the op nor the exact gradient reads a number from the device or copies one to it."""
    weight = make()
    n, k = weight.shape
    session = q4.Session(q4.SessionConfig(device=DEVICE), registry=registry())
    layer = session.linear(weight, torch.ones(n))
    x, grad = torch.randn(3, k), torch.randn(3, n)
    x_there, grad_there = x.to(DEVICE), grad.to(DEVICE)
    seen.waits.clear()
    seen.ops.clear()
    y = layer(x_there)
    assert (seen.ops, seen.waits) == ([], [])
    z = layer._forward(x_there, layer.bias, None, None)
    assert (seen.ops, seen.waits) == (["q4core::linear"], [])
    gradient = torch.ops.q4core.linear_input_grad(grad_there, layer._own_buffers(), layer._plan_key)
    exact = torch.ops.q4core.linear_exact(x_there, layer._own_buffers(), layer._plan_key)
    assert seen.waits == []
    dense = q4.dequantize(weight, torch.float64)
    wanted, size = x.double() @ dense.T, x.double().abs() @ dense.abs().T + 1
    for got in (y, z, exact + 1):
        assert bool(((got.cpu() - (wanted + 1)).abs() <= (k + 8) * 2.0**-24 * size + 2.0**-24).all())
    bound = (n + 8) * 2.0**-24 * (grad.double().abs() @ dense.abs())
    assert bool(((gradient.cpu() - grad.double() @ dense).abs() <= bound).all())


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0] > 0),
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t[0]),
    "tolist": lambda t: t.tolist(),
    "equal": lambda t: torch.equal(t, t),
    "nonzero": lambda t: t.nonzero(),
    "masked": lambda t: t[t > 0],
    "unique": torch.unique,
    "masked_select": lambda t: torch.masked_select(t, t > 0),
    "to the host": lambda t: t.cpu(),
    "to numpy's place": lambda t: torch.empty(4).copy_(t),
    "from the host": lambda t: t + torch.ones(4).to(DEVICE),
    "a tensor of numbers": lambda t: t + torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE),
    "an index of the host": lambda t: t[torch.tensor([1, 0])],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_pretended_device_sees_who_waits(seen: Pretence, read: Callable[[torch.Tensor], Any]) -> None:
    """Each way of reading from the device, or of copying to it from pageable memory, is noted."""
    there = torch.arange(4.0, device=DEVICE)
    assert seen.waits == []
    read(there)
    assert seen.waits != []


def test_the_pretended_device_lets_pass_what_does_not_wait(seen: Pretence) -> None:
    """Kernels, views, indices on the device and numbers as arguments are not noted."""
    there = torch.arange(4.0, device=DEVICE)
    index = torch.arange(3, device=DEVICE)
    (there[1:] * 2 + 1).sum().add_(there[index].sum())
    there.index_select(0, index).to(torch.bfloat16).contiguous().view(3, 1)
    torch.full((2,), 3.0, device=DEVICE)
    there[:2] = there[2:]
    assert seen.waits == []
