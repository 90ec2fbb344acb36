"""The registered ops: schema, fake kernels, autograd, counting by layer, out-variant."""

from __future__ import annotations

import pytest
import torch
from fakes import FakeBackend, registry
from torch.library import opcheck

import q4core as q4
from q4core.plan import plan_by_key

N, K = 24, 128


def _layer(*, exports: bool = True, format_: str = "nf4", bias: bool = False) -> q4.Q4Linear:
    session = q4.Session(registry=registry(FakeBackend(exports=exports)))
    generator = torch.Generator().manual_seed(4)
    weight = q4.quantize(torch.randn(N, K, generator=generator), format_)
    return session.linear(weight, torch.randn(N, generator=generator) if bias else None)


@pytest.mark.parametrize("exports", [True, False])
@pytest.mark.parametrize("format_", ["nf4", "nvfp4", "q4_1", "int4"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_linear(exports: bool, format_: str, requires_grad: bool) -> None:
    """torch's own checks of schema, fake kernel, autograd and tracing pass, over 2-D and 3-D inputs."""
    layer = _layer(exports=exports, format_=format_, bias=True)
    for shape in ((3, K), (2, 2, K), (0, K)):
        x = torch.randn(*shape, requires_grad=requires_grad)
        arguments = (x, layer._own_buffers(), layer.bias, layer._plan_key)
        opcheck(torch.ops.q4core.linear.default, arguments)


def test_opcheck_the_other_ops() -> None:
    """The out-variant and the gradient op pass torch's checks too."""
    layer = _layer()
    buffers = layer._own_buffers()
    out = torch.empty(3, N)
    opcheck(torch.ops.q4core.linear_out.default, (torch.randn(3, K), buffers, None, layer._plan_key, out))
    opcheck(torch.ops.q4core.linear_input_grad.default, (torch.randn(3, N), buffers, layer._plan_key))


def test_gradcheck_in_float64_is_not_offered_but_finite_differences_agree() -> None:
    """The op is linear in x, so one large finite difference is exact up to rounding."""
    layer = _layer(bias=True)
    x = torch.randn(2, K, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    for column in (0, 1, K - 1):
        step = torch.zeros(2, K)
        step[0, column] = 64.0
        with torch.no_grad():
            slope = (layer(x + step) - layer(x - step)).double().sum() / 128.0
        torch.testing.assert_close(slope.float(), gradient[0, column], rtol=1e-4, atol=1e-4)


def test_layers_of_one_shape_share_a_plan_and_count_apart() -> None:
    """Equal layers have one plan name, and the op still tells them apart."""
    session = q4.Session(registry=registry(FakeBackend()))
    one, two = (session.linear(q4.quantize(torch.randn(N, K), "nf4")) for _ in range(2))
    assert one._plan_key == two._plan_key
    x = torch.randn(1, K)
    torch.ops.q4core.linear(x, one._own_buffers(), None, one._plan_key)
    torch.ops.q4core.linear(x, one._own_buffers(), None, one._plan_key)
    torch.ops.q4core.linear(x, two._own_buffers(), None, two._plan_key)
    assert (one.diagnostics().calls, two.diagnostics().calls) == ((2,), (1,))


def test_layers_over_one_weight_count_apart() -> None:
    """Two layers whose buffers are the same mapped bytes are still two layers."""
    session = q4.Session(registry=registry())
    weight = q4.quantize(torch.randn(N, K), "nf4")
    one, two = session.linear(weight), session.linear(weight)
    torch.ops.q4core.linear(torch.randn(1, K), two._own_buffers(), None, two._plan_key)
    assert (one.diagnostics().calls, two.diagnostics().calls) == ((0,), (1,))


def test_a_plan_name_depends_on_its_facts_only() -> None:
    """The name is the same for equal facts in another registry's backend, but for the number that tells them apart."""
    first, second = _layer()._plan_key, _layer()._plan_key
    assert first.split("#")[0] == second.split("#")[0]
    assert first != second
    assert _layer(format_="nvfp4")._plan_key.split("#")[0] != first.split("#")[0]


def test_an_unknown_plan_is_a_typed_error() -> None:
    """A plan that this process never made is refused with the way out."""
    with pytest.raises(q4.LifecycleError, match=r"[Pp]repare"):
        plan_by_key("nobody/0000")


def test_the_out_variant_allocates_nothing_large() -> None:
    """``out=`` through the op writes in place: the same storage, no copy of the result."""
    layer = _layer()
    out = torch.empty(3, N)
    address = out.data_ptr()
    x = torch.randn(3, K)
    torch.ops.q4core.linear_out(x, layer._own_buffers(), None, layer._plan_key, out)
    assert out.data_ptr() == address
    assert torch.equal(out, layer(x))


def test_gradients_survive_a_compiled_graph_with_out_free_layers() -> None:
    """aot_eager traces forward and backward of the op, and the gradients are the eager ones."""
    torch._dynamo.reset()
    layer = _layer(bias=True)
    compiled = torch.compile(lambda x: torch.relu(layer(x)).sum(), fullgraph=True, backend="aot_eager")
    a, b = torch.randn(3, K, requires_grad=True), None
    b = a.detach().clone().requires_grad_()
    compiled(a).backward()
    torch.relu(layer(b)).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad, b.grad)
