"""The registered ops: schema, fake kernels, autograd, counting by layer, out-variant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.library import opcheck

import q4core as q4
from tests.support.fakes import FakeBackend, registry

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """Equal layers have one plan name, and the op still distinguishes them."""
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
    """Equal facts give the same name in another registry's backend, but for a number that distinguishes them."""
    first, second = _layer()._plan_key, _layer()._plan_key
    assert first.split("#")[0] == second.split("#")[0]
    assert first != second
    assert _layer(format_="nvfp4")._plan_key.split("#")[0] != first.split("#")[0]


def test_an_unknown_plan_is_a_typed_error() -> None:
    """A plan that this process never made is refused with a hint."""
    with pytest.raises(q4.LifecycleError, match=r"[Pp]repare"):
        torch.ops.q4core.linear(torch.zeros(1, K), _layer()._own_buffers(), None, "nobody/0000")


META = torch.device("meta")
BAD_X: dict[str, torch.Tensor] = {
    "too narrow": torch.zeros(4, K // 2),
    "too wide": torch.zeros(4, 2 * K),
    "no axis": torch.zeros(()),
    "another dtype": torch.zeros(4, K, dtype=torch.bfloat16),
    "integers": torch.zeros(4, K, dtype=torch.int8),
    "another device": torch.zeros(4, K, device=META),
}
BAD_BIAS: dict[str, torch.Tensor] = {
    "short": torch.zeros(N - 1),
    "long": torch.zeros(N + 1),
    "two axes": torch.zeros(1, N),
    "another dtype": torch.zeros(N, dtype=torch.bfloat16),
    "another device": torch.zeros(N, device=META),
}
BAD_OUT: dict[str, torch.Tensor] = {
    "too few rows": torch.zeros(3, N),
    "too narrow": torch.zeros(4, N - 1),
    "another rank": torch.zeros(4 * N),
    "another dtype": torch.zeros(4, N, dtype=torch.bfloat16),
    "one row for all": torch.zeros(1, N).expand(4, N),
    "another device": torch.zeros(4, N, device=META),
}


def _is_refused(name: str, op: Any, *arguments: Any) -> None:
    with pytest.raises(q4.InputError) as caught:
        op(*arguments)
    assert caught.value.name == name


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fault", BAD_X)
def test_the_op_refuses_an_x_that_does_not_fit(fault: str, grad: bool) -> None:
    """A kernel reads as many bytes as the plan says, so that x must have them, for any caller of the op."""
    layer, x = _layer(), BAD_X[fault].clone()
    if grad and x.is_floating_point():
        x.requires_grad_()
    rest = (layer._own_buffers(), None, layer._plan_key)
    _is_refused("x", torch.ops.q4core.linear, x, *rest)
    with torch.no_grad():
        _is_refused("x", torch.ops.q4core.linear_out, x, *rest, torch.zeros(4, N))
        if fault != "another dtype":  # computed in float32 from any
            _is_refused("x", torch.ops.q4core.linear_exact, x, layer._own_buffers(), layer._plan_key)


@pytest.mark.parametrize("fault", BAD_BIAS)
def test_the_op_refuses_a_bias_that_does_not_fit(fault: str) -> None:
    """As many numbers as out-features, of the layer's dtype, on its device."""
    layer = _layer()
    rest = (layer._own_buffers(), BAD_BIAS[fault], layer._plan_key)
    _is_refused("bias", torch.ops.q4core.linear, torch.zeros(4, K), *rest)
    _is_refused("bias", torch.ops.q4core.linear_out, torch.zeros(4, K), *rest, torch.zeros(4, N))


@pytest.mark.parametrize("fault", BAD_OUT)
def test_the_op_refuses_an_out_that_does_not_fit(fault: str) -> None:
    """As many rows as x has, each with a place of its own."""
    layer = _layer()
    _is_refused(
        "out", torch.ops.q4core.linear_out, torch.zeros(4, K), layer._own_buffers(), None, layer._plan_key,
        BAD_OUT[fault],
    )  # fmt: skip
    flat = torch.zeros(4 * (K + N))
    x, out = flat[: 4 * K].view(4, K), flat[4 * K - 1 : 4 * K - 1 + 4 * N].view(4, N)
    _is_refused("out", torch.ops.q4core.linear_out, x, layer._own_buffers(), None, layer._plan_key, out)


@pytest.mark.parametrize("shape", [(4, N - 1), (2, 2 * N), ()])
def test_the_gradient_op_refuses_a_gradient_that_does_not_fit(shape: tuple[int, ...]) -> None:
    """N numbers for each row."""
    layer = _layer()
    _is_refused("grad", torch.ops.q4core.linear_input_grad, torch.zeros(shape), layer._own_buffers(), layer._plan_key)


def _foreign(buffers: list[torch.Tensor]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    first = buffers[0]
    yield "one too few", buffers[:-1]
    yield "one too many", [*buffers, buffers[-1]]
    for index, buffer in enumerate(buffers):
        others = (buffers[:index], buffers[index + 1 :])
        yield f"{index} empty", [*others[0], buffer[:0], *others[1]]
        yield f"{index} of another dtype", [*others[0], buffer.view(torch.int8), *others[1]]
        yield f"{index} on another device", [*others[0], buffer.to(META), *others[1]]
    yield "short, at the own address", [first[: len(first) // 2], *buffers[1:]]
    yield "of another weight's size", [torch.cat((first, first)), *buffers[1:]]
    yield "one row for all", [first[:1].expand_as(first), *buffers[1:]]
    yield "in steps", [torch.cat((first, first))[::2], *buffers[1:]]


@pytest.mark.parametrize("exports", [True, False])
def test_the_ops_refuse_foreign_buffers(exports: bool) -> None:
    """Too few, short, spread out or elsewhere: a kernel gets buffers of the sizes that its plan was made for."""
    layer = _layer(exports=exports)
    x, key, taken = torch.zeros(4, K), layer._plan_key, []
    for what, buffers in _foreign(layer._own_buffers()):
        calls: dict[str, tuple[Any, ...]] = {
            "linear": (x, buffers, None, key),
            "linear_out": (x, buffers, None, key, torch.zeros(4, N)),
            "linear_exact": (x, buffers, key),
            "linear_input_grad": (torch.zeros(4, N), buffers, key),
        }
        for name, arguments in calls.items():
            try:
                getattr(torch.ops.q4core, name)(*arguments)
                taken.append((what, name, "taken"))
            except q4.InputError as error:
                taken += [] if str(error.name).startswith("buffers") else [(what, name, str(error))]
    assert taken == []


def test_another_layers_buffers_of_the_same_plan_are_taken() -> None:
    """Copies have the sizes that the plan reads; the layer of the tag counts the call."""
    layer = _layer()
    buffers = [*(buffer.clone() for buffer in layer._own_buffers()[:-1]), layer._own_buffers()[-1]]
    x = torch.randn(4, K)
    assert torch.equal(torch.ops.q4core.linear(x, buffers, None, layer._plan_key), layer(x))
    assert layer.diagnostics().calls == (2,)


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
