"""``Q4Linear.weight``: the facts of a dense weight, and a typed error where its numbers are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable

N, K = 6, 64
X = torch.ones(2, K)


@pytest.fixture
def weight() -> Any:
    """Return the weight of a packed layer, as code for ``nn.Linear`` takes it."""
    packed = q4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), "nf4")
    return q4.Q4Linear(packed, name="blocks.3.mixer").weight


def _assign(weight: Any) -> None:
    weight.data = torch.zeros(N, K)


NUMBERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "functional.linear": (lambda weight: functional.linear(X, weight), "linear"),
    "torch.matmul": (lambda weight: torch.matmul(X, weight), "matmul"),
    "@ t()": (lambda weight: X @ weight.t(), "t"),
    "@ T": (lambda weight: X @ weight.T, "T"),
    "x @": (lambda weight: X.T @ weight, "matmul"),
    "@ x": (lambda weight: weight @ X.T, "matmul"),
    "nested": (lambda weight: torch.cat([X, weight]), "cat"),
    "out": (lambda weight: torch.neg(X, out=weight), "out"),
    "index": (lambda weight: weight[0], "getitem"),
    "set": (lambda weight: weight.__setitem__(0, 1.0), "setitem"),
    "list": (list, "iter"),
    "scaled": (lambda weight: 2 * weight, "rmul"),
    "norm": (lambda weight: weight.data.norm(), "norm"),
    "in place": (lambda weight: weight.data.mul_(2), "mul_"),
    "init": (nn.init.zeros_, "zero"),
    "assigned": (_assign, "data ="),
    "address": (lambda weight: weight.data_ptr(), "data_ptr"),
    "gradients": (lambda weight: weight.requires_grad_(), "requires_grad_"),
    "parameter": (nn.Parameter, "detach"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_are_a_typed_error(case: str, weight: Any) -> None:
    """What wants a dense weight names the layer, the function, the rule and a hint."""
    read, name = NUMBERS[case]
    with pytest.raises(q4.PackedWeightError, match=r"'blocks\.3\.mixer': weight must be a dense tensor for") as caught:
        read(weight)
    assert name in str(caught.value.rule)
    assert caught.value.value == "a weight packed as nf4"
    assert "dequantize(layer.packed_weight())" in str(caught.value)
    assert "skip=['mixer']" in str(caught.value)


def test_facts_are_those_of_the_dense_weight(weight: Any) -> None:
    """Sizes, dtype and device are answered as a dense weight in the layer's dtype would."""
    dense = torch.zeros(N, K, dtype=weight.dtype)
    for found in (weight, weight.data):
        for name in ("shape", "dtype", "device", "ndim", "is_cuda", "is_meta", "requires_grad"):
            assert getattr(found, name) == getattr(dense, name)
        for name in ("size", "dim", "numel", "nelement", "element_size", "is_floating_point"):
            assert getattr(found, name)() == getattr(dense, name)()
        assert len(found) == len(dense)
    weight.requires_grad = False
    assert weight.requires_grad_(False) is weight  # torch's
    assert "nf4" in repr(weight)
    assert weight
    assert not hasattr(weight, "no_such_name")


def test_a_layer_without_a_weight_says_so() -> None:
    """A layer that waits for its weight has none to read either."""
    with pytest.raises(q4.PackedWeightError, match="got 'no weight yet'"):
        functional.linear(X, q4.Q4Linear.empty(N, K).weight)  # type: ignore[arg-type]  # on purpose


def test_facts_are_answered_in_compiled_code() -> None:
    """Code that asks for the weight's dtype compiles."""
    layer = q4.Q4Linear(q4.quantize(torch.ones(N, K), "nf4"))

    def product(x: torch.Tensor) -> Any:
        return layer(x.to(layer.weight.dtype)) * layer.weight.shape[0]

    assert torch.equal(torch.compile(product, backend="eager")(X), product(X))
