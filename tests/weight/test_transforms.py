"""Derivatives of every kind through a layer are exact, or refused: never silently zero."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import q4core as q4
from tests.support.fakes import FakeBackend, registry

# torch itself warns when it first loads what forward mode needs.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
N, K = 40, 64
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _weight() -> q4.PackedWeight:
    return q4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(3)), "nf4")


@pytest.fixture(params=[False, True], ids=["bare", "bias"])
def layer(request: pytest.FixtureRequest) -> q4.Q4Linear:
    """Return a layer of a backend that exports, with and without a bias."""
    bias = torch.nn.Parameter(torch.randn(N)) if request.param else None
    return q4.Session(registry=registry(FakeBackend())).linear(_weight(), bias)


def _dense() -> torch.Tensor:
    return q4.dequantize(_weight())


def _dense_linear() -> Linear:
    dense = _dense()  # now: nothing random may run under vmap
    return lambda x, bias: torch.nn.functional.linear(x, dense, bias)


X = torch.randn(3, K, generator=torch.Generator().manual_seed(4))
TANGENT = torch.randn(3, K, generator=torch.Generator().manual_seed(5))


def test_forward_mode(layer: q4.Q4Linear) -> None:
    """The tangent of y is the exact product of x's tangent, with and without recording for backward."""
    for needs_grad in (False, True):
        x = X.clone().requires_grad_(needs_grad)
        with forward_ad.dual_level():
            y = layer(forward_ad.make_dual(x, TANGENT))
            both = forward_ad.unpack_dual(y)
            primal, tangent = both.primal, both.tangent
        torch.testing.assert_close(primal, layer(X))
        torch.testing.assert_close(tangent, TANGENT @ _dense().T)


def test_forward_mode_of_the_bias() -> None:
    """A tangent of the bias is y's."""
    layer = q4.Session(registry=registry(FakeBackend())).linear(_weight())
    seed = torch.randn(N)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer.with_bias(X, forward_ad.make_dual(torch.zeros(N), seed))).tangent
    torch.testing.assert_close(tangent, seed.expand(3, N))


def _batched(shape: tuple[int, ...], dim: int | None, seed: int) -> torch.Tensor:
    """Return random numbers of a shape, with a batch axis of 4 at ``dim``."""
    full = list(shape)
    if dim is not None:
        full.insert(dim, 4)
    return torch.randn(full, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("x_dim", "bias_dim", "tangent_dim"),
    list(itertools.product((None, 0, 1), repeat=3))[1:],  # vmap wants a batch of something
)
def test_vmap_of_jvp_of_the_bias(x_dim: int | None, bias_dim: int | None, tangent_dim: int | None) -> None:
    """A batch of tangents of the bias, of biases, of x, or of any of them: y and its tangent are F.linear's."""
    layer = q4.Session(registry=registry(FakeBackend())).linear(_weight())
    x, bias = _batched((3, K), x_dim, 7), _batched((N,), bias_dim, 8)
    tangent = _batched((N,), tangent_dim, 9)

    def differentiate(linear: Linear) -> Any:
        def one(x: torch.Tensor, bias: torch.Tensor, tangent: torch.Tensor) -> Any:
            return torch.func.jvp(lambda moved: linear(x, moved), (bias,), (tangent,))

        return torch.func.vmap(one, in_dims=(x_dim, bias_dim, tangent_dim))(x, bias, tangent)

    torch.testing.assert_close(differentiate(layer.with_bias), differentiate(_dense_linear()))


@pytest.mark.parametrize("x_dim", [None, 0, 1])
@pytest.mark.parametrize("bias_dim", [0, 1])
@pytest.mark.parametrize("moved", ["bias", "x and bias"])
def test_jvp_of_vmap_of_the_bias(x_dim: int | None, bias_dim: int, moved: str) -> None:
    """Forward mode over a batch of biases gives F.linear's y and tangent, whether x has a tangent as well or not."""
    layer = q4.Session(registry=registry(FakeBackend())).linear(_weight())
    x, bias = _batched((3, K), x_dim, 7), _batched((N,), bias_dim, 8)
    x_tangent, tangent = _batched((3, K), x_dim, 9), _batched((N,), bias_dim, 10)

    def differentiate(linear: Linear) -> Any:
        mapped = torch.func.vmap(linear, in_dims=(x_dim, bias_dim))
        if moved == "bias":
            return torch.func.jvp(lambda bias: mapped(x, bias), (bias,), (tangent,))
        return torch.func.jvp(mapped, (x, bias), (x_tangent, tangent))

    torch.testing.assert_close(differentiate(layer.with_bias), differentiate(_dense_linear()))


def test_func_jvp_and_jacfwd(layer: q4.Q4Linear) -> None:
    """torch.func's forward mode gives the exact derivative."""
    tangent = torch.func.jvp(layer, (X,), (TANGENT,))[1]
    torch.testing.assert_close(tangent, TANGENT @ _dense().T)
    torch.testing.assert_close(torch.func.jacfwd(layer)(X[0]), _dense())


def test_func_grad_and_jacrev(layer: q4.Q4Linear) -> None:
    """torch.func's reverse mode gives the exact derivative."""
    grad = torch.func.grad(lambda x: layer(x).sum())(X)
    torch.testing.assert_close(grad, _dense().sum(0).expand(3, K))
    torch.testing.assert_close(torch.func.jacrev(layer)(X[0]), _dense())


def test_func_vmap(layer: q4.Q4Linear) -> None:
    """A batch axis anywhere in x is one more leading axis."""
    torch.testing.assert_close(torch.func.vmap(layer)(X), layer(X))
    stacked = torch.stack((X, 2 * X), -1)
    torch.testing.assert_close(torch.func.vmap(layer, in_dims=-1, out_dims=-1)(stacked)[..., 1], layer(2 * X))


def test_hessian_of_a_square(layer: q4.Q4Linear) -> None:
    """Forward over reverse works: the Hessian of |y|² / 2 is wᵀ w."""
    hessian = torch.func.hessian(lambda x: layer(x).square().sum() / 2)(X[0])
    torch.testing.assert_close(hessian, _dense().T @ _dense(), rtol=1e-4, atol=1e-4)


def test_the_bare_op_refuses_transforms(layer: q4.Q4Linear) -> None:
    """The registered op called under a transform says how to do it instead of giving a zero."""
    buffers = layer._own_buffers()

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.q4core.linear(x, buffers, None, layer._plan_key)
        return y

    with pytest.raises(q4.InputError, match="Q4Linear"):
        torch.func.jvp(call, (X,), (TANGENT,))
