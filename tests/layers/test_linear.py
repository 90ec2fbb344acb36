"""``Q4Linear``: values, gradients, refusals, and every way of moving and saving it."""

from __future__ import annotations

import gc
import io
import multiprocessing
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import q4core as q4
from tests.support.fakes import FakeBackend, registry

if TYPE_CHECKING:
    from collections.abc import Callable

N, K = 48, 128


def _weight(format_: str = "nf4", *, seed: int = 0, name: str | None = "proj") -> q4.PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    return q4.quantize(torch.randn(N, K, generator=generator), format_, name=name)


def _x(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def _expected(x: torch.Tensor, weight: q4.PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x.to(torch.float64) @ q4.dequantize(weight, torch.float64).T
    return y if bias is None else y + bias


def _close(y: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, weight: q4.PackedWeight) -> bool:
    """Judge by the float32 bound gamma(K + 8) of Higham, plus one rounding to y's dtype."""
    size = x.to(torch.float64).abs() @ q4.dequantize(weight, torch.float64).abs().T + expected.abs()
    half_ulp = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[y.dtype]
    bound = (K + 8) * 2.0**-24 * 1.001 * size + half_ulp * (expected.abs() + size * K * 2.0**-24)
    return bool(((y.to(torch.float64) - expected).abs() <= bound).all())


@pytest.fixture
def session() -> q4.Session:
    """A session over the reference alone."""
    return q4.Session(registry=registry())


@pytest.mark.parametrize("shape", [(K,), (1, K), (7, K), (2, 3, K), (0, K), (2, 0, K)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_is_right_for_every_rank(
    session: q4.Session, shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype
) -> None:
    """Any leading dimensions, with and without bias, in each dtype, M = 0 included."""
    weight = _weight()
    bias = _x(N, seed=2).to(dtype) if with_bias else None
    with q4.using(q4.SessionConfig(compute_dtype=dtype)):
        layer = q4.Session(registry=registry()).linear(weight, bias)
    x = _x(*shape, dtype=dtype)
    y = layer(x)
    assert y.shape == (*shape[:-1], N)
    assert y.dtype == dtype
    expected = _expected(x, weight, None if bias is None else bias.to(torch.float64))
    assert _close(y.detach(), expected, x, weight)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "offset", "expanded"])
@pytest.mark.parametrize("grad", [False, True])
def test_any_layout_of_x_gives_the_same_bits(session: q4.Session, layout: str, grad: bool) -> None:
    """Strided, transposed, offset and expanded inputs are computed right, by the fast path and by the op."""
    layer = session.linear(_weight())
    base = _x(6, K)
    layouts: dict[str, Callable[[], torch.Tensor]] = {
        "contiguous": lambda: base + 0,
        "transposed": lambda: base.T.contiguous().T,
        "strided": lambda: torch.stack((base, base), 1).flatten(0, 1)[::2],
        "offset": lambda: torch.cat((torch.zeros(3), base.flatten()))[3:].view(6, K),
        "expanded": lambda: base[:1].expand(6, K),
    }
    x = layouts[layout]()
    expected = layer(base if layout != "expanded" else base[:1].repeat(6, 1))
    assert torch.equal(layer(x.detach().requires_grad_(grad)).detach(), expected)


@pytest.mark.parametrize("grad_mode", [False, True])
def test_out_is_written_and_returned(session: q4.Session, grad_mode: bool) -> None:
    """``out=`` is filled completely, contiguous or not, and is what comes back."""
    layer = session.linear(_weight(), _x(N))
    x = _x(5, K)
    expected = layer(x)
    with torch.set_grad_enabled(grad_mode):
        whole = torch.full((5, N), torch.nan)
        assert layer(x, out=whole) is whole
        assert torch.equal(whole, expected)
        columns = torch.full((N, 5), torch.nan).T
        assert layer(x, out=columns) is columns
        assert torch.equal(columns, expected)


def test_out_dtype_rounds_once_more(session: q4.Session) -> None:
    """``out_dtype`` gives the result in another dtype."""
    layer = session.linear(_weight())
    x = _x(3, K)
    assert torch.equal(layer(x, out_dtype=torch.bfloat16), layer(x).to(torch.bfloat16))
    out = torch.empty(3, N, dtype=torch.bfloat16)
    assert torch.equal(layer(x, out_dtype=torch.bfloat16, out=out), layer(x).to(torch.bfloat16))


BAD_INPUTS: list[tuple[str, Any, str]] = [
    ("features", lambda: torch.zeros(2, K + 1), f"[..., {K}]"),
    ("rank", lambda: torch.zeros(()), f"[..., {K}]"),
    ("dtype", lambda: torch.zeros(2, K, dtype=torch.float64), "torch.float32"),
    ("integers", lambda: torch.zeros(2, K, dtype=torch.int64), "torch.float32"),
    ("device", lambda: torch.zeros(2, K, device="meta"), "on device cpu"),
    ("no tensor", lambda: [0.0] * K, "a tensor"),
]


@pytest.mark.parametrize(("case", "make", "rule"), BAD_INPUTS, ids=[case for case, _, _ in BAD_INPUTS])
def test_bad_input_names_the_layer_and_the_rule(session: q4.Session, case: str, make: Any, rule: str) -> None:
    """Wrong size, rank, dtype, device or type is a typed error with the layer's name, never a wrong number."""
    layer = session.linear(_weight(name="model.layers.3.up"))
    with pytest.raises(q4.InputError) as caught:
        layer(make())
    assert "model.layers.3.up" in str(caught.value)
    assert rule in (caught.value.rule or "")


@pytest.mark.parametrize(
    "out",
    [torch.empty(3, N + 1), torch.empty(3, N, dtype=torch.float64), torch.empty(3, N, device="meta")],
    ids=["shape", "dtype", "device"],
)
def test_bad_out_is_refused(session: q4.Session, out: torch.Tensor) -> None:
    """An ``out`` of the wrong shape, dtype or device is refused."""
    with pytest.raises(q4.InputError) as caught:
        session.linear(_weight())(_x(3, K), out=out)
    assert caught.value.name == "out"


def test_out_that_overlaps_x_is_refused(session: q4.Session) -> None:
    """Writing y over x would read what was just written."""
    layer = session.linear(q4.quantize(torch.randn(K, K), "nf4"))
    x = _x(3, K)
    with pytest.raises(q4.InputError) as caught:
        layer(x, out=x)
    assert caught.value.name == "out"


def test_bad_bias_is_refused(session: q4.Session) -> None:
    """A bias of the wrong length is refused when the layer is made."""
    with pytest.raises(q4.InputError) as caught:
        session.linear(_weight(), torch.zeros(N + 1))
    assert caught.value.name == "bias"


@pytest.mark.parametrize("format_", ["nf4", "nvfp4", "q4_1", "int4"])
def test_gradient_to_the_input_is_exact(session: q4.Session, format_: str) -> None:
    """The input's gradient is grad @ w with exactly dequantised weights."""
    weight = _weight(format_)
    layer = session.linear(weight)
    x = _x(4, K).requires_grad_()
    grad = _x(4, N, seed=5)
    layer(x).backward(grad)
    assert x.grad is not None
    exact = grad.to(torch.float64) @ q4.dequantize(weight, torch.float64)
    size = grad.to(torch.float64).abs() @ q4.dequantize(weight, torch.float64).abs()
    assert bool(((x.grad.to(torch.float64) - exact).abs() <= (N + 8) * 2.0**-24 * 1.001 * size).all())


def test_bias_gets_its_gradient(session: q4.Session) -> None:
    """A trainable bias is trained; an untrainable one is left alone."""
    bias = nn.Parameter(_x(N))
    layer = session.linear(_weight(), bias)
    assert layer.bias is bias
    grad = _x(2, 3, N, seed=5)
    layer(_x(2, 3, K)).backward(grad)
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))


def test_out_where_gradients_are_recorded_is_refused(session: q4.Session) -> None:
    """``out=`` can't carry a gradient, so it is refused instead of cutting the graph."""
    layer = session.linear(_weight())
    with pytest.raises(q4.InputError) as caught:
        layer(_x(2, K).requires_grad_(), out=torch.empty(2, N))
    assert caught.value.name == "out"


def test_state_round_trip_is_strict_and_bit_equal(session: q4.Session) -> None:
    """Saving and loading gives the same bits and the same keys; forward leaves the state alone."""
    layer = session.linear(_weight(), _x(N))
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    y = layer(_x(3, K))
    after = layer.state_dict()
    assert list(after) == ["bias", "weight.spec", "weight.qdata", "weight.scale"]
    assert all(torch.equal(before[key], after[key]) for key in before)
    other = session.linear(_weight(seed=9), torch.zeros(N))
    other.load_state_dict(before, strict=True)
    assert torch.equal(other(_x(3, K)), y)


def test_state_dict_survives_torch_save(session: q4.Session) -> None:
    """The state dict holds tensors only, so ``weights_only`` loading takes it."""
    layer = session.linear(_weight("nvfp4"))
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    other = session.linear(_weight("nvfp4", seed=3))
    other.load_state_dict(loaded)
    assert torch.equal(other(_x(2, K)), layer(_x(2, K)))


def test_loading_reports_missing_unexpected_and_damaged_keys(session: q4.Session) -> None:
    """Strict loading names every key that is missing, too much, or damaged."""
    layer = session.linear(_weight())
    good = layer.state_dict()
    kept = layer(_x(1, K))
    without = {key: value for key, value in good.items() if key != "weight.scale"}
    with pytest.raises(RuntimeError, match=r"weight\.scale"):
        layer.load_state_dict(without)
    with pytest.raises(RuntimeError, match=r"weight\.extra"):
        layer.load_state_dict({**good, "weight.extra": torch.zeros(1)})
    damaged = {**good, "weight.spec": torch.zeros(4, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="weight spec"):
        layer.load_state_dict(damaged)
    wrong = session.linear(q4.quantize(torch.randn(N, 2 * K), "nf4")).state_dict()
    with pytest.raises(RuntimeError, match=f"{N}×{K}"):
        layer.load_state_dict(wrong)
    assert torch.equal(layer(_x(1, K)), kept)


def test_loaded_state_is_a_copy(session: q4.Session) -> None:
    """Writing to the state dict after loading does not reach the layer."""
    layer, state = session.linear(_weight()), session.linear(_weight(seed=7)).state_dict()
    state = {key: value.clone() for key, value in state.items()}
    layer.load_state_dict(state)
    y = layer(_x(1, K))
    state["weight.scale"].zero_()
    assert torch.equal(layer(_x(1, K)), y)


def test_half_keeps_codes_and_scales_and_takes_half_inputs(session: q4.Session) -> None:
    """``.half()``, ``.bfloat16()`` and ``.double()`` never touch the packed bytes."""
    layer = session.linear(_weight(), _x(N))
    before = {key: value.clone() for key, value in layer.state_dict().items() if key != "bias"}
    for change, dtype in ((layer.half, torch.float16), (layer.bfloat16, torch.bfloat16), (layer.float, torch.float32)):
        change()
        assert layer.weight.dtype == dtype
        assert layer.bias is not None
        assert layer.bias.dtype == dtype
        assert layer(_x(2, K, dtype=dtype)).dtype == dtype
        after = layer.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
    layer.double()
    assert layer(_x(2, K)).dtype == torch.float32


def test_meta_layer_waits_for_its_state(session: q4.Session) -> None:
    """A layer on the meta device has shapes, refuses to run, and runs once its state is loaded."""
    source = session.linear(_weight())
    layer = session.linear(_weight().to("meta"))
    assert layer.weight.device.type == "meta"
    assert layer.weight.shape == (N, K)
    with pytest.raises(q4.LifecycleError):
        layer(_x(1, K))
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer(_x(1, K)), source(_x(1, K)))


def test_weight_answers_what_linear_code_asks(session: q4.Session) -> None:
    """``.weight`` has dtype, device, shape and size, as code for ``nn.Linear`` expects."""
    layer = session.linear(_weight())
    assert layer.weight.shape == torch.Size((N, K))
    assert layer.weight.size(1) == K
    assert layer.weight.numel() == N * K
    assert layer.weight.device == torch.device("cpu")
    assert (layer.in_features, layer.out_features) == (K, N)


def test_rows_are_the_dequantised_rows(session: q4.Session) -> None:
    """Row look-up gives exactly the dequantised rows, in any order and shape, with and without an export."""
    for backend in (None, FakeBackend(exports=True), FakeBackend(exports=False)):
        owner = session if backend is None else q4.Session(registry=registry(backend))
        weight = _weight("q8_0")
        layer = owner.linear(weight)
        index = torch.tensor([[3, 0, 3], [47, 1, 2]])
        assert torch.equal(layer.rows(index), q4.dequantize(weight)[index])
        assert layer.rows(torch.empty(0, dtype=torch.int64)).shape == (0, K)
        for bad in (torch.tensor([N]), torch.tensor([-1]), torch.tensor([0.5])):
            with pytest.raises(q4.InputError):
                layer.rows(bad)


@pytest.mark.parametrize("declares", [True, False])
def test_levels_of_scales_are_preserved_without_export(*, declares: bool) -> None:
    """A backend that reads plain scales alone leaves a double-quantised weight's levels with the layer."""
    dense = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    weight = q4.quantize(dense, "nf4", scale_kind=q4.ScaleKind.DOUBLE_QUANT)
    kinds: dict[str, Any] = {"scale_kinds": frozenset({q4.ScaleKind.PLAIN})} if not declares else {}
    got = q4.Session(registry=registry(FakeBackend(exports=False, **kinds))).linear(weight).packed_weight()
    assert got.scale_kind is q4.ScaleKind.DOUBLE_QUANT
    assert torch.equal(got.scale, weight.scale)


def test_a_backend_without_export_keeps_its_source_and_says_so() -> None:
    """Without export the source stays, the report counts its bytes, and state and gradients still work."""
    weight = _weight()
    keeping = q4.Session(registry=registry(FakeBackend(exports=False))).linear(weight)
    exporting = q4.Session(registry=registry(FakeBackend(exports=True))).linear(weight)
    assert keeping.diagnostics().source_bytes == weight.nbytes
    assert exporting.diagnostics().source_bytes == 0
    x = _x(2, K).requires_grad_()
    keeping(x).sum().backward()
    kept = keeping.state_dict()
    assert all(torch.equal(kept[key], value) for key, value in exporting.state_dict().items())


def test_the_layer_lets_go_of_its_source() -> None:
    """Once prepared, the layer holds no reference to the weight that it was made from."""
    weight = _weight()
    reference = weakref.ref(weight)
    layer = q4.Session(registry=registry(FakeBackend())).linear(weight)
    del weight
    gc.collect()
    assert reference() is None
    assert layer.is_prepared


def test_functional_call_uses_the_buffers_it_is_given(session: q4.Session) -> None:
    """``torch.func.functional_call`` with other buffers computes with those."""
    layer, other = session.linear(_weight()), session.linear(_weight(seed=8))
    x = _x(2, K)
    swapped = {name: buffer for name, buffer in other.named_buffers() if not name.endswith(layer._buffer_names[-1])}
    assert torch.equal(torch.func.functional_call(layer, swapped, (x,)), other(x))
    assert not torch.equal(layer(x), other(x))


def test_functional_call_may_swap_any_one_buffer(session: q4.Session) -> None:
    """Swapping just the scales, or just the codes, is seen by the fast path and by the op."""
    layer, other = session.linear(_weight()), session.linear(_weight(seed=8))
    x = _x(2, K)
    for name in layer._buffer_names[:-1]:
        swapped = {name: other.get_buffer(name)}
        for grad in (False, True):
            y = torch.func.functional_call(layer, swapped, (x.clone().requires_grad_(grad),))
            assert not torch.equal(y, layer(x)), name


def test_vmap_and_modes_do_not_reach_the_backend_unseen(session: q4.Session) -> None:
    """Under a dispatch mode the call goes through the registered op, where the mode sees it."""
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415  # torch's own place for it

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    layer = session.linear(_weight())
    watch: Any = Watch
    with watch():
        layer(_x(1, K))
    assert any("q4core.linear" in name for name in seen)


def test_autocast_casts_to_the_layers_dtype(session: q4.Session) -> None:
    """Under autocast another float dtype is cast, as it is for ``nn.Linear``."""
    layer = session.linear(_weight())
    x = _x(2, K, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), layer(x.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_that_casts_its_input_answers_in_xs_dtype(dtype: torch.dtype, session: q4.Session) -> None:
    """Where ``casts_input`` is set, x of another float dtype gives what the cast x does, in x's dtype."""
    layer, x = session.linear(_weight()), _x(5, K, dtype=dtype)
    with pytest.raises(q4.InputError, match="x must be"):
        layer(x)
    layer.casts_input = True
    expected = layer(x.float())
    assert torch.equal(layer(x), expected.to(dtype))
    assert layer(x, out_dtype=torch.float32).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype is dtype
    for wrong in (x.long(), [1.0]):
        with pytest.raises(q4.InputError, match="x must be"):
            layer(wrong)
    traced = x.clone().requires_grad_()
    layer(traced).sum().backward()
    assert traced.grad is not None
    assert traced.grad.dtype is dtype


@pytest.mark.parametrize("exports", [True, False])
def test_twelve_layers_compile_into_one_graph(exports: bool) -> None:
    """``fullgraph=True`` over twelve layers is one graph, right, and counted layer by layer."""
    from torch._dynamo.testing import CompileCounter  # noqa: PLC0415  # torch's own place for it

    torch._dynamo.reset()
    session = q4.Session(registry=registry(FakeBackend(exports=exports)))
    layers = [session.linear(q4.quantize(torch.randn(K, K) / K, "nvfp4", name=f"l{i}")) for i in range(12)]
    model = nn.Sequential(*layers)
    x = _x(2, K)
    expected = model(x)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 1
    assert [layer.diagnostics().calls for layer in layers] == [(2,)] * 12


def test_a_layer_that_is_not_prepared_cannot_be_traced(session: q4.Session) -> None:
    """Compiling a layer that waits for its state is an error that says so."""
    torch._dynamo.reset()
    layer = session.linear(_weight().to("meta"))
    with pytest.raises(Exception, match=r"prepared|state dict"):
        torch.compile(layer, fullgraph=True, backend="eager")(_x(1, K))


def test_inductor_computes_the_same(session: q4.Session) -> None:
    """AOT autograd with gradients agrees with eager."""
    torch._dynamo.reset()
    layer = session.linear(_weight(), _x(N))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    a, b = _x(3, K).requires_grad_(), _x(3, K).requires_grad_()
    layer(a).square().sum().backward()
    compiled(b).square().sum().backward()
    assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]  # both were just made


def test_copying_back_and_forth_between_devices_keeps_the_bytes(session: q4.Session) -> None:
    """``.to("meta")`` leaves shapes; the state saved before comes back bit for bit."""
    layer = session.linear(_weight(), _x(N))
    state, y = layer.state_dict(), layer(_x(1, K))
    layer.to("meta")
    assert not layer.is_prepared
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer(_x(1, K)), y)


def _serve(layer: q4.Q4Linear, x: torch.Tensor, threads: int) -> tuple[torch.Tensor, str]:
    torch.set_num_threads(threads)  # conftest.py does not run here, and a float32 matmul's bits depend on it
    return layer(x).detach(), layer.diagnostics().backend


@pytest.mark.slow
@pytest.mark.usefixtures("reference_alone")
def test_a_spawned_process_gets_the_same_bits() -> None:
    """A layer sent to a spawned process selects there for itself; with as many threads it computes the same bits."""
    layer = q4.Session().linear(_weight("nvfp4"), _x(N))
    x = _x(6, K)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        y, backend = pool.apply(_serve, (layer, x, torch.get_num_threads()))
    assert torch.equal(y, layer(x))
    assert backend == "dequant-fallback"


@pytest.mark.parametrize("rows", [1, 19])
def test_autocast_changes_no_number_of_a_backend(rows: int) -> None:
    """A backend that multiplies by torch is prepared, proven and called as if autocast were off."""
    weight = q4.quantize(torch.randn(40, 448, generator=torch.Generator().manual_seed(3)), "nf4")
    x = torch.randn(rows, 448, generator=torch.Generator().manual_seed(4))
    q4.reset_registry()
    config = q4.SessionConfig(backend="dequant-fallback", compute_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), q4.Session(config) as session:
        there = session.linear(weight)(x)
        assert torch.is_autocast_enabled("cpu")
    with q4.Session(config) as session:
        assert there.dtype is torch.float32
        assert torch.equal(there, session.linear(weight)(x))


def _tangent(layer: torch.nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    tangent: torch.Tensor = torch.func.jvp(layer, (x,), (t,))[1]
    return tangent


def _second_backward(layer: torch.nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    grad = torch.ones(x.shape[0], N, requires_grad=True)
    leaf = x.clone().requires_grad_()
    first = torch.autograd.grad(layer(leaf), leaf, grad, create_graph=True)[0]
    return torch.autograd.grad(first, grad, t)[0]


def _first_backward(layer: torch.nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(layer(leaf), leaf, t[:, :1].expand(-1, N))[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("derivative", [_tangent, _first_backward, _second_backward])
def test_autocast_changes_no_derivative(derivative: Callable[..., torch.Tensor], session: q4.Session) -> None:
    """Tangents and gradients of both orders are what they are where autocast is off."""
    layer = session.linear(_weight("nf4"))
    x, t = _x(3, K), _x(3, K)
    grad = derivative(layer, x, t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        there = derivative(layer, x, t)
    assert torch.equal(there, grad)
