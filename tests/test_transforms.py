"""Derivatives of every kind through a layer are exact, or refused: never silently zero."""

from __future__ import annotations

import pytest
import torch
from fakes import FakeBackend, registry
from torch.autograd import forward_ad

import q4core as q4

# torch itself warns when it first loads what forward mode needs.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
N, K = 40, 64


def _weight() -> q4.PackedWeight:
    return q4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(3)), "nf4")


@pytest.fixture(params=[False, True], ids=["bare", "bias"])
def layer(request: pytest.FixtureRequest) -> q4.Q4Linear:
    """Return a layer of a backend that exports, with and without a bias."""
    bias = torch.nn.Parameter(torch.randn(N)) if request.param else None
    return q4.Session(registry=registry(FakeBackend())).linear(_weight(), bias)


def _dense() -> torch.Tensor:
    return q4.dequantize(_weight())


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


def test_straight_through_forward_mode() -> None:
    """linear_ste passes tangents of x, and those of the master unchanged."""
    master = torch.randn(N, K, generator=torch.Generator().manual_seed(6))
    dense = q4.training.ste_weight(master)
    with forward_ad.dual_level():
        y = q4.training.linear_ste(forward_ad.make_dual(X, TANGENT), master)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, TANGENT @ dense.T)
        seed = torch.randn(N, K)
        y = q4.training.linear_ste(X, forward_ad.make_dual(master, seed))
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, X @ seed.T)


def test_the_bare_op_refuses_transforms(layer: q4.Q4Linear) -> None:
    """The registered op called under a transform says how to do it instead of giving a zero."""
    buffers = layer._own_buffers()

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.q4core.linear(x, buffers, None, layer._plan_key)
        return y

    with pytest.raises(q4.InputError, match="Q4Linear"):
        torch.func.jvp(call, (X,), (TANGENT,))
