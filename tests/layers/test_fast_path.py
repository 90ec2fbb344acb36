"""The fast path of eager calls: what it takes straight to the backend, on the CPU and on a pretended CUDA device."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import q4core as q4
from tests.support.fakes import FakeBackend, registry
from tests.support.frames import functions_entered
from tests.support.pretended import DEVICE, Pretence, on_another_device, pretended_cuda
from tests.support.samples import random_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N, K = 48, 128
OP, OP_OUT = "q4core::linear", "q4core::linear_out"


class _Backend(FakeBackend):
    """A right backend that notes the current device of each call."""

    def __init__(self) -> None:
        super().__init__(devices={"cpu", "cuda"})
        self.current: list[int] = []

    def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
        if x.is_cuda:
            self.current.append(torch.cuda.current_device())
        super().linear(prepared, x, out, bias=bias, path=path)


class _Watched:
    """A layer with its backend, on one device."""

    def __init__(self, device: str) -> None:
        self.device, self.backend = device, _Backend()
        session = q4.Session(q4.SessionConfig(device=device), registry=registry(self.backend))
        self.weight = q4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), "nf4")
        self.layer = session.linear(self.weight, torch.ones(N))
        self.bare = session.linear(self.weight)
        self.backend.calls.clear()
        self.backend.current.clear()

    def x(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(self.device)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, device=self.device)

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu() @ q4.dequantize(self.weight).T + 1


@pytest.fixture
def seen() -> Iterator[Pretence]:
    """What a pretended CUDA device saw."""
    with pretended_cuda() as pretence:
        yield pretence


@pytest.fixture
def cuda(seen: Pretence) -> _Watched:
    """A layer on the pretended device."""
    watched = _Watched(DEVICE)
    seen.ops.clear()
    seen.waits.clear()
    return watched


@pytest.fixture(params=["cpu", DEVICE])
def watched(request: pytest.FixtureRequest) -> Iterator[_Watched]:
    """A layer on the CPU and on the pretended device in turn."""
    with contextlib.nullcontext() if request.param == "cpu" else pretended_cuda():
        yield _Watched(request.param)


@pytest.mark.parametrize("shape", [(K,), (1, K), (1, 1, K), (7, K), (2, 3, K)])
@pytest.mark.parametrize("has_out", [False, True])
def test_a_plain_call_on_a_cuda_device_goes_straight_to_the_backend(
    seen: Pretence, cuda: _Watched, shape: tuple[int, ...], has_out: bool
) -> None:
    """No registered op is called, the host waits for nothing, and y is the layer's, on the device."""
    x, out = cuda.x(*shape), cuda.empty(*shape[:-1], N)
    seen.waits.clear()
    y = cuda.layer(x, out=out) if has_out else cuda.layer(x)
    assert (seen.ops, seen.waits) == ([], [])
    rows = x.numel() // K
    assert cuda.backend.calls == [("fake_gemm", rows)]
    assert y is out or not has_out
    assert (y.device, y.dtype, y.shape) == (torch.device(DEVICE), torch.float32, (*shape[:-1], N))
    assert torch.allclose(y.cpu(), cuda.expected(x), atol=1e-4)
    assert cuda.layer.diagnostics().calls == (1,)


@pytest.mark.parametrize("shape", [(1, K), (1, 1, K)])
def test_a_token_enters_no_other_function(shape: tuple[int, ...]) -> None:
    """A row's call goes from the layer's forward to the fast path, and from there to the backend."""
    session = q4.Session(registry=registry(FakeBackend()))
    layer = session.linear(q4.quantize(torch.randn(N, K), "nf4"), torch.ones(N))
    x = torch.randn(*shape)
    found = functions_entered(lambda: layer(x), "q4core.", "tests.support.fakes")
    expected = ["q4core.layers.linear.forward", "q4core.layers.fast_path.fast", "tests.support.fakes.linear"]
    assert found[:3] == expected  # and what the fake one computes by
    assert not [name for name in found[3:] if name.startswith(("q4core.layers", "q4core.ops", "q4core.selection"))]


def test_a_token_of_three_sizes_is_checked_as_a_row_is() -> None:
    """x of [1, 1, K] has the same bits, and an out that overlaps it, or has another shape, is refused."""
    session = q4.Session(registry=registry(FakeBackend()))
    layer = session.linear(q4.quantize(torch.randn(K, K), "nf4"), torch.ones(K))
    x = torch.randn(1, 1, K)
    assert torch.equal(layer(x), layer(x.view(1, K)).view(1, 1, K))
    for out in (x, torch.empty(1, K), torch.empty(1, 1, K, dtype=torch.float64)):
        with pytest.raises(q4.InputError, match="out"):
            layer(x, out=out)


def test_on_another_current_device_the_op_makes_xs_device_the_current_one(seen: Pretence, cuda: _Watched) -> None:
    """A backend launches on the current device, so that it is x's during the call and the caller's afterwards."""
    x, out = cuda.x(2, K), cuda.empty(2, N)
    seen.current = 1
    y = cuda.layer(x)
    cuda.layer(x, out=out)
    assert seen.ops == [OP, OP_OUT]
    assert (cuda.backend.current, seen.current) == ([0, 0], 1)
    assert torch.equal(y.cpu(), out.cpu())
    seen.current = 0
    cuda.layer(x)
    assert seen.ops == [OP, OP_OUT]


def test_preparing_probing_and_exporting_have_the_layers_device_current(seen: Pretence) -> None:
    """Code is loaded on the current device: it is the layer's, whichever the caller's is, and then that again."""
    places: dict[str, set[int]] = {}

    class Noting(_Backend):
        def prepare(self, *arguments: Any) -> q4.Prepared:
            places.setdefault("prepare", set()).add(torch.cuda.current_device())
            return super().prepare(*arguments)

        def linear(self, *arguments: Any, **named: Any) -> None:
            places.setdefault("probe", set()).add(torch.cuda.current_device())
            super().linear(*arguments, **named)

        def _export(self, *arguments: Any) -> q4.PackedWeight:
            places.setdefault("export", set()).add(torch.cuda.current_device())
            return super()._export(*arguments)

    seen.current = 1
    session = q4.Session(q4.SessionConfig(device="cuda:0"), registry=registry(Noting()))
    session.linear(q4.quantize(torch.randn(N, K), "nf4"))
    assert places == {"prepare": {0}, "probe": {0}, "export": {0}}
    assert seen.current == 1


@pytest.mark.parametrize("move", [on_another_device, lambda tensor: tensor.cpu()], ids=["cuda:1", "cpu"])
@pytest.mark.parametrize("what", ["x", "out", "bias"])
def test_a_tensor_on_another_device_is_refused(
    cuda: _Watched, what: str, move: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Nothing but tensors of the layer's device reaches the backend; the slow way says what is wrong."""
    given = {"x": cuda.x(2, K), "out": cuda.empty(2, N)}
    if what == "bias":
        cuda.layer._parameters["bias"] = move(cuda.x(N))  # type: ignore[assignment]  # as a careless user may
    else:
        given[what] = move(given[what])
    with pytest.raises(q4.InputError) as caught:
        cuda.layer(given["x"], out=given["out"])
    assert (caught.value.name, caught.value.what) == (what, f"layer {cuda.layer.name!r}")
    assert cuda.backend.calls == []


@pytest.mark.usefixtures("seen")
def test_a_cuda_tensor_is_refused_by_a_layer_on_the_cpu() -> None:
    """x, out and bias must be on the CPU there, as usual."""
    here = _Watched("cpu")
    fast = here.layer._fast
    assert fast is not None
    x = here.x(2, K)
    for given, out in ((x.to(DEVICE), None), (x, torch.empty(2, N, device=DEVICE))):
        assert fast(given, out) is None
        with pytest.raises(q4.InputError):
            here.layer(given, out=out)
    assert here.backend.calls == []


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _inside_a_transform() -> Iterator[None]:
    level = torch._C._functorch._vmap_increment_nesting(1, "error")
    assert level == 1
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


MODES = [_Dispatch, _Function, _inside_a_transform, forward_ad.dual_level]


@pytest.mark.parametrize("mode", MODES, ids=["dispatch", "function", "transform", "forward"])
def test_whatever_watches_torch_sees_the_call(watched: _Watched, mode: Callable[[], Any]) -> None:
    """Dispatch modes, function modes, transforms and forward mode take the slow way; without them a call is plain."""
    fast = watched.layer._fast
    assert fast is not None
    x = watched.x(2, K)
    assert fast(x, None) is not None
    with mode():
        assert fast(x, None) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("has_out", [False, True])
def test_a_traced_layer_computes(has_out: bool) -> None:
    """``torch.jit.trace`` records the op: what it returns computes, with other values and another number of rows."""
    here = _Watched("cpu")

    def call(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = here.layer(x, out=torch.empty(x.shape[0], N)) if has_out else here.layer(x)
        return y

    with torch.no_grad():
        traced = torch.jit.trace(call, (here.x(3, K),))
        for rows in (3, 5):
            x = torch.randn(rows, K)
            assert torch.equal(traced(x), here.layer(x))
    assert "q4core::linear" in str(traced.graph)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_nothing_is_prepared_while_a_tracer_records() -> None:
    """A trace would hold the self-probe's tensors, and the probe would judge recorded sizes: a typed refusal."""
    weight = random_weight("nf4", N, K)
    with pytest.raises(q4.LifecycleError, match="inside a trace"):
        torch.jit.trace(lambda x: q4.linear(x, weight), (torch.zeros(3, K),))
    x = torch.randn(3, K)
    expected = q4.linear(x, weight)
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: q4.linear(x, weight), (torch.zeros(3, K),))
    assert torch.equal(traced(x), expected)


def test_a_profiler_sees_the_op(watched: _Watched) -> None:
    """A call takes the op while a profiler records, and no longer."""
    fast = watched.layer._fast
    assert fast is not None
    x = watched.x(2, K)
    with torch.no_grad(), torch.profiler.profile() as profile:
        watched.layer(x)
        assert fast(x, None) is None
    assert OP in {event.key for event in profile.key_averages()}
    assert fast(x, None) is not None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", [torch._neg_view, lambda x: torch.complex(x, x).conj().imag])
def test_signs_that_are_still_to_be_turned_are_turned(make: Callable[[torch.Tensor], torch.Tensor], grad: bool) -> None:
    """torch keeps some negations as a bit of the tensor; a backend never sees one, in x, bias or out."""
    here = _Watched("cpu")
    plain = here.x(3, K)
    x = make(plain)
    assert x.is_neg()
    x = x.detach().requires_grad_(grad)
    expected = here.expected(x.detach().resolve_neg())
    torch.testing.assert_close(here.layer(x).detach(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(here.layer.with_bias(x, make(-torch.ones(N))).detach(), expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        out = make(torch.empty(3, N))
        torch.testing.assert_close(here.layer(x, out=out), expected, atol=1e-4, rtol=1e-4)
    buffers, key = here.layer._own_buffers(), here.layer._plan_key
    y = torch.ops.q4core.linear(x, buffers, make(-torch.ones(N)), key)
    torch.testing.assert_close(y.detach(), here.expected(x.detach().resolve_neg()), atol=1e-4, rtol=1e-4)
    if grad:
        (gradient,) = torch.autograd.grad(here.layer(x), x, make(torch.ones(3, N)))
        dense = q4.dequantize(here.weight)
        torch.testing.assert_close(gradient, make(torch.ones(3, N)).resolve_neg() @ dense, atol=1e-4, rtol=1e-4)


def _of_another_class(tensor: torch.Tensor) -> torch.Tensor:
    own: Any = tensor
    kind: Any = type("Kind", (type(tensor),), {})
    made: torch.Tensor = kind(own.memory) if tensor.is_cuda else tensor.as_subclass(kind)
    return made


def _unfit(watched: _Watched) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    x, out = watched.x(2, K), watched.empty(2, N)
    yield "x in steps", watched.x(2, 2 * K)[:, ::2], None
    yield "x of another dtype", x.to(torch.bfloat16), None
    if x.is_cpu:  # the pretence has no such bit
        yield "x with signs to turn", torch._neg_view(x), None
        yield "out with signs to turn", x, torch._neg_view(out)
    yield "x too wide", watched.x(2, K + 1), None
    yield "no row", watched.x(0, K), None
    yield "no axis", watched.x(1)[0], None
    yield "x of another class", _of_another_class(x), None
    yield "out of another class", x, _of_another_class(out)
    yield "out in steps", x, watched.empty(2, 2 * N)[:, ::2]
    yield "out of another dtype", x, out.to(torch.bfloat16)
    yield "out too wide", x, watched.empty(2, N + 1)
    yield "out in x", x, x[:, :N]
    flat = watched.x(2 * K + 2 * N)
    yield "out over the end of x", flat[: 2 * K].view(2, K), flat[2 * K - 1 : 2 * K - 1 + 2 * N].view(2, N)
    yield "out over the start of x", flat[2 * N - 1 : 2 * N - 1 + 2 * K].view(2, K), flat[: 2 * N].view(2, N)


def test_what_needs_a_second_look_takes_the_slow_way(watched: _Watched) -> None:
    """Whatever is not contiguous, of the layer's dtype and sizes, and apart in memory is left to the op."""
    fast = watched.layer._fast
    assert fast is not None
    assert fast(watched.x(2, K), watched.empty(2, N)) is not None
    taken = [what for what, x, out in _unfit(watched) if fast(x, out) is not None]
    assert taken == []


def test_gradients_take_the_slow_way(watched: _Watched) -> None:
    """Where x or the bias requires gradients and they are recorded, the op runs; under no_grad the call is plain."""
    fast, bare = watched.layer._fast, watched.bare._fast
    assert fast is not None
    assert bare is not None
    x = watched.x(2, K)
    wanting = watched.x(2, K).requires_grad_()
    out = watched.empty(2, N).requires_grad_()
    assert fast(wanting, None) is None
    assert bare(wanting, None) is None
    assert fast(x, out) is None
    bias = watched.layer.bias
    assert bias is not None
    bias.requires_grad_()
    assert fast(x, None) is None
    with torch.no_grad():
        assert fast(x, None) is not None
        assert fast(wanting, None) is not None


def test_swapped_buffers_take_the_slow_way(watched: _Watched) -> None:
    """A buffer or a bias that is not the layer's own is seen."""
    fast = watched.layer._fast
    assert fast is not None
    x = watched.x(2, K)
    for key in watched.layer._buffer_names:
        own = watched.layer._buffers[key]
        assert own is not None
        watched.layer._buffers[key] = own.clone()
        assert fast(x, None) is None
        watched.layer._buffers[key] = own
    assert fast(x, None) is not None
    for bias in (watched.x(N + 1), watched.x(N).to(torch.bfloat16), watched.x(2 * N)[::2]):
        watched.layer._parameters["bias"] = bias  # type: ignore[assignment]  # as a careless user may
        assert fast(x, None) is None


def test_a_backend_that_raises_is_named_on_a_cuda_device_too(cuda: _Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend raises in a plain call is a BackendError with its name and path."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image")

    backend = _Backend()
    layer = q4.Session(q4.SessionConfig(device=DEVICE), registry=registry(backend)).linear(cuda.weight)
    assert layer.diagnostics().backend == "fake"
    monkeypatch.setattr(backend, "damage", fail)
    with pytest.raises(q4.BackendError, match=r"'fake', path 'fake_gemm', raised RuntimeError: no kernel image"):
        layer(cuda.x(2, K))
