"""A backend may compute the gradient to the input itself, once it is proven; else the core does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.events import forget_warnings, heard
from tests.support.fakes import FakeBackend, registry

if TYPE_CHECKING:
    from collections.abc import Callable

N, K = 40, 128
PATH = q4.KernelPath("fake_gradient", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 20)
LONG = 300
CONFIG = q4.SessionConfig(gradients=True)


class Differentiating(FakeBackend):
    """A right backend with an input gradient, damaged as configured; remembers each call of it."""

    def __init__(
        self,
        name: str = "differentiating",
        *,
        gradient_paths: tuple[q4.KernelPath, ...] = (PATH,),
        gradient_reasons: tuple[q4.Reason, ...] = (),
        gradient_damage: Callable[[torch.Tensor, str], torch.Tensor] = lambda grad, _: grad,
        **facts: Any,
    ) -> None:
        super().__init__(name, ops={"linear", "input_gradient"}, **facts)
        self.gradient_paths, self.gradient_reasons = gradient_paths, gradient_reasons
        self.gradient_damage = gradient_damage
        self.gradients: list[tuple[str, int]] = []
        self.contexts: list[q4.PrepareContext] = []

    def check(self, request: q4.Request) -> q4.Support:
        """Answer for either op."""
        if request.op == "linear":
            return super().check(request)
        assert request.op == "input_gradient"
        self.requests.append(request)
        if self.gradient_reasons:
            return q4.Support.no(self.gradient_reasons, native_state="no gradient")
        return q4.Support.yes(self.gradient_paths, native_state="gradient")

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        """Copy the tensors, and remember the context."""
        self.contexts.append(context)
        return super().prepare(weight, request, context)

    def input_gradient(self, prepared: q4.Prepared, grad: torch.Tensor, out: torch.Tensor, *, path: str) -> None:
        """Compute through the codec, damaged as configured."""
        assert grad.dim() == out.dim() == 2
        assert grad.is_contiguous()
        assert out.is_contiguous()
        self.gradients.append((path, grad.shape[0]))
        dense = q4.dequantize(prepared.meta.build(prepared.tensors), torch.float32)
        out.copy_(self.gradient_damage(grad.to(torch.float32) @ dense, path))


def _weight(seed: int = 3) -> q4.PackedWeight:
    return q4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(seed)), "nf4")


def _layer(backend: FakeBackend, config: q4.SessionConfig = CONFIG, **facts: Any) -> q4.Q4Linear:
    return q4.Session(config, registry=registry(backend)).linear(_weight(), name="proj", **facts)


def _assert_right(layer: q4.Q4Linear, rows: int = 3) -> None:
    x = torch.randn(rows, K, requires_grad=True)
    grad = torch.randn(rows, N)
    layer(x).backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad @ q4.dequantize(_weight()))


def test_backward_calls_the_backend() -> None:
    """A declared and proven gradient is what backward runs, with the path that serves so many rows."""
    few = attrs.evolve(PATH, name="few", m=(1, 8))
    many = attrs.evolve(PATH, name="many", m=(9, None))
    backend = Differentiating(gradient_paths=(few, many))
    layer = _layer(backend)
    probed = {path for path, _ in backend.gradients}
    assert probed == {"few", "many"}
    backend.gradients.clear()
    _assert_right(layer, 3)
    _assert_right(layer, 20)
    assert backend.gradients == [("few", 3), ("many", 20)]
    record = layer.diagnostics()
    assert [segment.path for segment in record.gradients] == [few, many]
    assert record.gradients_refused == ()
    assert [item["name"] for item in record.to_dict()["gradients"]] == ["few", "many"]


def test_prepare_receives_the_gradient_paths() -> None:
    """The context says which gradient paths serve which rows; none where no gradients are asked for."""
    backend = Differentiating()
    _layer(backend, m=(2, 30))
    assert [(item.low, item.high, item.path) for item in backend.contexts[-1].gradient_paths] == [(2, 30, PATH)]
    _layer(backend, q4.SessionConfig())
    assert backend.contexts[-1].gradient_paths == ()


def test_nothing_is_asked_or_probed_for_inference() -> None:
    """Without a request for gradients the backend is never asked for one, and backward is the core's own."""
    backend = Differentiating()
    layer = _layer(backend, q4.SessionConfig())
    assert {request.op for request in backend.requests} == {"linear"}
    _assert_right(layer)
    assert backend.gradients == []


def test_a_proof_of_linear_does_not_cover_the_gradient() -> None:
    """A gradient of the same path is probed although linear was proven before, and a wrong one is found."""
    path = attrs.evolve(PATH, name="same")
    backend = Differentiating(paths=(path,), gradient_paths=(path,), gradient_damage=lambda grad, _: grad * 1.001)
    plugins = registry(backend)
    q4.Session(registry=plugins).linear(_weight())
    with pytest.warns(q4.Q4ProbeWarning, match="input gradient"):
        layer = q4.Session(CONFIG, registry=plugins).linear(_weight())
    assert layer.diagnostics().backend == "differentiating"
    assert layer.diagnostics().disqualified == ()
    _assert_right(layer)


def _one_zero(grad: torch.Tensor, _: str) -> torch.Tensor:
    return torch.where(torch.arange(grad.numel()).view_as(grad) == 7, 0.0, grad)


def _raise(grad: torch.Tensor, _: str) -> torch.Tensor:
    raise RuntimeError(f"no gradient of {len(grad)} rows")


@pytest.mark.parametrize("damage", [_one_zero, _raise, lambda grad, _: torch.zeros_like(grad)])
def test_a_wrong_gradient_bars_the_gradient_alone(damage: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
    """The probe finds it: a warning, an event, a reason in the record; linear stays, and the core differentiates."""
    backend = Differentiating(gradient_damage=damage)
    with heard("q4.probe") as events, pytest.warns(q4.Q4ProbeWarning, match="core computes"):
        layer = _layer(backend)
    record = layer.diagnostics()
    assert (record.backend, record.gradients) == ("differentiating", ())
    assert [reason.code for reason in record.gradients_refused] == [q4.ReasonCode.PROBE_FAILED]
    assert "fake_gradient" in str(record)
    assert record.to_dict()["gradients_refused"][0]["domain"] == "build"
    assert record.proven
    told = [fields for fields in events if fields["op"] == "input_gradient"]
    assert [(fields["path"], fields["passed"]) for fields in told] == [("fake_gradient", False)]
    backend.gradients.clear()
    _assert_right(layer)
    assert backend.gradients == []


def test_a_wrong_gradient_is_reported_element_by_element() -> None:
    """The probe of a gradient names its worst element, too, and one that was not written as such."""
    with pytest.warns(
        q4.Q4ProbeWarning, match=r"1 of 128 elements is wrong; worst out\[0, 7\] = 0, exact .+ ± .+ × its"
    ):
        _layer(Differentiating(gradient_damage=_one_zero))

    class Lazy(Differentiating):
        def input_gradient(self, *_: Any, **__: Any) -> None:
            """Write nothing."""

    forget_warnings()
    with pytest.warns(q4.Q4ProbeWarning, match="elements not written, or NaN"):
        _layer(Lazy())


def test_another_gradient_path_takes_over() -> None:
    """Where one of two gradient paths is wrong, the other one serves and the record says why not the first."""
    better = attrs.evolve(PATH, name="better", tier=30)
    backend = Differentiating(
        gradient_paths=(PATH, better), gradient_damage=lambda grad, path: grad * (2 if path == "better" else 1)
    )
    with pytest.warns(q4.Q4ProbeWarning, match="better"):
        layer = _layer(backend)
    assert [segment.path for segment in layer.diagnostics().gradients] == [PATH]
    assert [reason.code for reason in layer.diagnostics().gradients_refused] == [q4.ReasonCode.PROBE_FAILED]
    _assert_right(layer)


def test_a_gradient_that_writes_to_grad_is_not_used() -> None:
    """It is compared with the gradient of what was given, not of what it left there."""

    class Halving(Differentiating):
        def input_gradient(self, prepared: q4.Prepared, grad: torch.Tensor, out: torch.Tensor, *, path: str) -> None:
            super().input_gradient(prepared, grad.mul_(0.5), out, path=path)

    with pytest.warns(q4.Q4ProbeWarning, match="wrote to grad at M = 1"):
        layer = _layer(Halving())
    assert layer.diagnostics().gradients == ()
    _assert_right(layer)


def test_a_gradient_that_resizes_out_is_not_used() -> None:
    """The core computes the gradient where the backend's own leaves a tensor of another size."""

    class Growing(Differentiating):
        def input_gradient(self, prepared: q4.Prepared, grad: torch.Tensor, out: torch.Tensor, *, path: str) -> None:
            out.resize_(0)

    with pytest.warns(q4.Q4ProbeWarning, match="resized or replaced out at M = 1"):
        layer = _layer(Growing())
    assert layer.diagnostics().gradients == ()
    _assert_right(layer)


def test_a_refused_gradient_is_the_cores() -> None:
    """A backend that declares gradients and refuses these keeps linear; its reasons stand in the record."""
    reasons = (q4.Reason(q4.ReasonCode.SHAPE, "K is odd"), q4.Reason(q4.ReasonCode.FEATURE, "no such layout"))
    layer = _layer(Differentiating(gradient_reasons=reasons))
    record = layer.diagnostics()
    assert (record.backend, record.gradients, record.gradients_refused) == ("differentiating", (), reasons)
    _assert_right(layer)


def test_a_check_that_raises_for_the_gradient_is_reported() -> None:
    """A fault of check bars the gradient, not the backend."""

    class Raising(Differentiating):
        def check(self, request: q4.Request) -> q4.Support:
            if request.op == "input_gradient":
                raise RuntimeError("no idea")
            return super().check(request)

    record = _layer(Raising()).diagnostics()
    assert record.backend == "differentiating"
    assert [reason.code for reason in record.gradients_refused] == [q4.ReasonCode.PLUGIN_ERROR]


@pytest.mark.parametrize(
    ("path", "config", "code"),
    [
        (attrs.evolve(PATH, kind=q4.PathKind.DEQUANT), {"compute_path": q4.ComputePath.KERNEL_ONLY}, "policy"),
        (attrs.evolve(PATH, precision=q4.Precision.W4A8), {}, "policy"),
        (attrs.evolve(PATH, m=(1, 8)), {}, "shape"),
    ],
)
def test_gradient_paths_obey_the_policy(path: q4.KernelPath, config: dict[str, Any], code: str) -> None:
    """A gradient path of a kind that may not serve, one that rounds, or a gap in M leaves the gradient to the core."""
    layer = _layer(Differentiating(gradient_paths=(path,)), q4.SessionConfig(gradients=True, **config))
    record = layer.diagnostics()
    assert (record.backend, record.gradients) == ("differentiating", ())
    assert [reason.code.value for reason in record.gradients_refused] == [code]
    _assert_right(layer)


def test_a_prepare_that_refuses_the_gradient_is_asked_for_linear_alone() -> None:
    """PrepareError with gradient paths wanted bars these; the same backend then prepares without them."""
    reason = q4.Reason(q4.ReasonCode.TOOLCHAIN, "the gradient does not compile")

    class Refusing(Differentiating):
        def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
            prepared = super().prepare(weight, request, context)
            if context.gradient_paths:
                raise q4.PrepareError([reason])
            return prepared

    backend = Refusing()
    session = q4.Session(CONFIG, registry=registry(backend))
    for _ in range(2):
        layer = session.linear(_weight())
        record = layer.diagnostics()
        assert (record.backend, record.gradients, record.gradients_refused) == ("differentiating", (), (reason,))
        _assert_right(layer)
    assert [bool(context.gradient_paths) for context in backend.contexts] == [True, False, False]


def test_a_gradient_has_a_gradient() -> None:
    """Double backward is exact: the gradient of the backend's gradient is the core's."""
    backend = Differentiating()
    layer = _layer(backend)
    backend.gradients.clear()
    x = torch.randn(3, K, requires_grad=True)
    grad = torch.randn(3, N, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x), x, grad, create_graph=True)
    seed = torch.randn(3, K)
    (second,) = torch.autograd.grad(first, grad, seed)
    torch.testing.assert_close(second, seed @ q4.dequantize(_weight()).T)
    assert backend.gradients == [("fake_gradient", 3)]


def test_compiled_backward_calls_the_backend() -> None:
    """A full graph's backward is the same call with the same numbers."""
    backend = Differentiating()
    layer = _layer(backend)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    backend.gradients.clear()
    x = torch.randn(2, 3, K, requires_grad=True)
    grad = torch.randn(2, 3, N)
    compiled(x).backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad @ q4.dequantize(_weight()))
    assert backend.gradients == [("fake_gradient", 6)]


def test_an_expanded_gradient_arrives_in_rows() -> None:
    """The gradient of a sum, which repeats one number, reaches the backend contiguous; so does a transposed one."""
    layer = _layer(Differentiating())
    x = torch.randn(2, 3, K, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, q4.dequantize(_weight()).sum(0).expand(2, 3, K))
    turned = torch.randn(N, 3).T
    x = torch.randn(3, K, requires_grad=True)
    layer(x).backward(turned)
    torch.testing.assert_close(x.grad, turned @ q4.dequantize(_weight()))


def test_no_rows_call_nothing() -> None:
    """Backward of an empty batch gives an empty gradient, without the backend."""
    backend = Differentiating()
    layer = _layer(backend)
    backend.gradients.clear()
    x = torch.empty(0, K, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, K)
    assert backend.gradients == []


def test_more_rows_than_asked_for_are_the_cores() -> None:
    """A batched gradient may have more rows than the forward was made for; the core computes it."""
    backend = Differentiating()
    layer = _layer(backend, m=(1, 4))
    backend.gradients.clear()
    x, grads = torch.randn(4, K), torch.randn(5, 4, N)
    pull: Any = torch.func.vjp(layer, x)[1]
    (got,) = torch.func.vmap(pull)(grads)
    torch.testing.assert_close(got, grads @ q4.dequantize(_weight()))
    assert backend.gradients == []
    _assert_right(layer, 4)
    assert backend.gradients == [("fake_gradient", 4)]


def test_a_gradient_that_raises_in_use_is_reported() -> None:
    """What a proven gradient raises later reaches the caller as an error that names backend and path."""
    broken = False

    def damage(grad: torch.Tensor, _: str) -> torch.Tensor:
        if broken:
            raise RuntimeError("out of luck")
        return grad

    layer = _layer(Differentiating(gradient_damage=damage))
    broken = True
    x = torch.randn(3, K, requires_grad=True)
    y = layer(x)
    with pytest.raises(q4.BackendError, match=r"input_gradient of backend 'differentiating', path 'fake_gradient'"):
        y.sum().backward()


def test_a_declared_gradient_needs_its_method() -> None:
    """A backend that declares the op without the method is refused at registration."""
    plugins = registry(FakeBackend("hollow", ops={"linear", "input_gradient"}))
    with pytest.warns(q4.Q4PluginWarning, match="input_gradient"):
        refused = plugins.invalid_backends()
    assert [item.name for item in refused] == ["hollow"]


@pytest.mark.parametrize("columns", [512, 1500])
def test_each_column_of_a_small_weight_is_probed(columns: int) -> None:
    """One wrong column is found; of a wide weight the columns at both ends and a stride between are compared."""
    last = columns - 1

    def damage(grad: torch.Tensor, _: str) -> torch.Tensor:
        return torch.where(torch.arange(columns) == last, grad + 1, grad)

    weight = q4.quantize(torch.randn(N, columns), "int4", block_size=columns)
    with pytest.warns(q4.Q4ProbeWarning, match="fake_gradient"):
        q4.Session(CONFIG, registry=registry(Differentiating(gradient_damage=damage))).linear(weight)


def test_gradients_of_bfloat16_layers() -> None:
    """The backend gets y's dtype and fills x's."""
    backend = Differentiating(gradient_paths=(attrs.evolve(PATH, precision=q4.Precision.W4A16),))
    session = q4.Session(q4.SessionConfig(gradients=True, compute_dtype=torch.bfloat16), registry=registry(backend))
    layer = session.linear(_weight())
    assert layer.diagnostics().gradients_refused == ()
    backend.gradients.clear()
    x = torch.randn(3, K, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(3, N).to(torch.bfloat16)
    layer(x).backward(grad)
    assert x.grad is not None
    assert x.grad.dtype is torch.bfloat16
    exact = grad.to(torch.float32) @ q4.dequantize(_weight())
    torch.testing.assert_close(x.grad.to(torch.float32), exact, rtol=2**-8, atol=1e-5)
    assert backend.gradients == [("fake_gradient", 3)]


@pytest.mark.parametrize("row", [0, 126, 127, 254, 299])
def test_every_row_of_a_long_gradient_is_compared(row: int) -> None:
    """From the 128th row on the probe's rows repeat, which bounds its float64 work; a wrong one is found wherever."""
    drawn: list[torch.Tensor] = []

    def damage(grad: torch.Tensor, _: str) -> torch.Tensor:
        if len(grad) == LONG:
            grad[row] *= 1.5
        return grad

    class Watched(Differentiating):
        def input_gradient(self, prepared: q4.Prepared, grad: torch.Tensor, out: torch.Tensor, *, path: str) -> None:
            drawn.append(grad)
            super().input_gradient(prepared, grad, out, path=path)

    backend = Watched(gradient_paths=(attrs.evolve(PATH, probe_rows=(LONG,)),), gradient_damage=damage)
    with pytest.warns(q4.Q4ProbeWarning, match=f"at M = {LONG}"):
        _layer(backend)
    assert {len(grad) for grad in drawn} >= {LONG}
    assert all(len(grad.unique(dim=0)) == min(len(grad), 127) for grad in drawn)
