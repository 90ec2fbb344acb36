"""What goes wrong in a layer is refused with a typed error, and leaves the layer as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from q4core.layers import linear
from tests.support.fakes import KERNEL_PATH, FakeBackend, plugin, registry

if TYPE_CHECKING:
    from collections.abc import Callable

N, K = 40, 128


def _weight(seed: int = 3, rows: int = N) -> q4.PackedWeight:
    return q4.quantize(torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)), "nf4")


def _layer(bias: torch.Tensor | None = None, **config: Any) -> q4.Q4Linear:
    return q4.Session(q4.SessionConfig(**config), registry=registry()).linear(_weight(), bias, name="proj")


X = torch.ones(2, K)

BIASES: dict[str, Callable[[], torch.Tensor]] = {
    "another dtype": lambda: torch.zeros(N, dtype=torch.float64),
    "another shape": lambda: torch.zeros(1),
    "another device": lambda: torch.zeros(N, device="meta"),
    "a matrix": lambda: torch.zeros(1, N),
}


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_bias_that_does_not_fit_is_refused_when_it_is_replaced(kind: str, grad: bool) -> None:
    """A bias put on the layer afterwards is checked before a backend sees it, on both ways through forward."""
    layer = _layer(torch.zeros(N))
    layer(X)
    layer.bias = torch.nn.Parameter(BIASES[kind](), requires_grad=grad)
    with pytest.raises(q4.InputError, match="bias") as caught:
        layer(X)
    assert "proj" in str(caught.value)


@pytest.mark.parametrize("grad", [False, True])
def test_a_strided_bias_is_computed_right(grad: bool) -> None:
    """A backend sees contiguous biases only, whatever the layer is given."""

    class Strict(FakeBackend):
        def linear(self, prepared: Any, x: Any, out: Any, *, bias: Any, path: str) -> None:
            assert bias is None or (bias.is_contiguous() and bias.dtype == out.dtype and bias.shape == (N,))
            super().linear(prepared, x, out, bias=bias, path=path)

    values = torch.arange(2 * N, dtype=torch.float32)[::2]
    session = q4.Session(registry=registry(Strict("strict")))
    layer = session.linear(_weight(), values)
    plain = session.linear(_weight())
    assert torch.equal(layer(X).detach(), (plain(X) + values).detach())
    layer.bias = torch.nn.Parameter(values, requires_grad=grad)
    assert torch.equal(layer(X).detach(), (plain(X) + values).detach())


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_bias_is_checked(assign: bool) -> None:
    """A state dict's bias of another shape is refused; of another dtype it is converted, assigned or copied."""
    layer = _layer(torch.zeros(N))
    state = _layer(torch.ones(N)).state_dict()
    state["bias"] = torch.zeros(1, N)
    with pytest.raises(RuntimeError, match="bias"):
        layer.load_state_dict(state, assign=assign)
    state["bias"] = torch.ones(N, dtype=torch.bfloat16)
    layer.load_state_dict(state, assign=assign)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.float32
    assert torch.equal(layer(X).detach(), _layer(torch.ones(N))(X).detach())


def test_to_keeps_the_bias_parameter() -> None:
    """.to(dtype) changes the data of the same Parameter, so that an optimiser still holds the layer's own."""
    bias = torch.nn.Parameter(torch.zeros(N))
    layer = _layer(bias)
    assert layer.bias is bias
    layer.to(torch.bfloat16)
    assert layer.bias is bias
    assert bias.dtype == torch.bfloat16
    layer.float()
    assert layer.bias is bias


def test_a_failed_load_changes_nothing() -> None:
    """A state that can't be prepared, or whose bias is wrong, leaves weight, bias, dtype and counters as they were."""
    layer = _layer(torch.zeros(N))
    before = layer(X).detach()
    wrong = _layer(torch.ones(N)).state_dict()
    wrong["weight.scale"] = torch.full_like(wrong["weight.scale"], torch.nan)
    with pytest.raises(RuntimeError, match="scale"):
        layer.load_state_dict(wrong)
    assert torch.equal(layer(X).detach(), before)
    assert torch.equal(layer.state_dict()["weight.scale"], _weight().scale)

    other = q4.Session(registry=registry()).linear(q4.quantize(torch.randn(N, K), "nvfp4"), torch.ones(N)).state_dict()
    kernel_only = q4.SessionConfig(compute_path=q4.ComputePath.KERNEL_ONLY)
    layer = q4.Session(kernel_only, registry=registry(FakeBackend(formats={"nf4"}))).linear(_weight(), torch.zeros(N))
    with pytest.raises(RuntimeError, match="nvfp4"):
        layer.load_state_dict(other)
    assert layer.weight.format == "nf4"
    assert "nf4" in repr(layer)
    assert torch.equal(layer.packed_weight().scale, _weight().scale)


def test_a_failed_move_changes_nothing() -> None:
    """A dtype that nothing serves is refused, and the layer goes on as it was, under torch.compile too."""
    kernel_only = q4.SessionConfig(compute_path=q4.ComputePath.KERNEL_ONLY)
    backend = FakeBackend(dtypes={torch.float32})
    layer = q4.Session(kernel_only, registry=registry(backend)).linear(_weight(), torch.zeros(N))
    before = layer(X).detach()
    with pytest.raises(q4.BackendUnavailableError):
        layer.half()
    assert layer.dtype == torch.float32
    assert layer.bias is not None
    assert layer.bias.dtype == torch.float32
    assert torch.equal(layer(X).detach(), before)
    assert layer.diagnostics().calls == (2,)


def test_a_closed_layer_stays_closed() -> None:
    """A state dict does not bring a layer back that its session closed."""
    session = q4.Session(registry=registry())
    layer = session.linear(_weight())
    state = layer.state_dict()
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        layer.load_state_dict(state)
    with pytest.raises(q4.LifecycleError):
        layer(X)


def test_an_export_that_makes_a_damaged_weight_is_the_backends_fault() -> None:
    """The error names the backend: the caller's weight is right."""
    backend = FakeBackend("mine")
    layer = q4.Session(registry=registry(backend)).linear(_weight())
    whole = backend.export
    backend.export = lambda *given: attrs.evolve(whole(*given), scale=torch.ones(1))
    with pytest.raises(q4.BackendError, match=r"export of backend 'mine' raised WeightError: .*scale"):
        layer.packed_weight()


@pytest.mark.parametrize(
    "use", [lambda layer: layer.packed_weight(), lambda layer: layer.rows(torch.zeros(1, dtype=torch.int64))]
)
def test_a_layer_that_is_being_closed_is_closed(use: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Use in another thread, at any point of ``close``, raises the error of a closed layer."""
    layer = q4.Session(registry=registry()).linear(_weight())
    told: list[str] = []

    def meanwhile(*_: object) -> None:
        with pytest.raises(q4.LifecycleError) as caught:
            use(layer)
        told.append(str(caught.value))

    monkeypatch.setattr(linear, "forget_weight", meanwhile)
    layer.close()
    assert len(told) == 1
    assert "closed" in told[0]


def test_a_layer_made_while_its_session_closes_is_closed() -> None:
    """close() in the middle of linear() gives every byte back: the layer is refused."""

    class Closing(FakeBackend):
        session: q4.Session

        def prepare(self, weight: Any, request: Any, context: Any) -> q4.Prepared:
            self.session.close()
            return super().prepare(weight, request, context)

    backend = Closing("closing")
    backend.session = q4.Session(registry=registry(backend))
    with pytest.raises(q4.LifecycleError):
        backend.session.linear(_weight())
    assert backend.session.layers() == []


BAD_CALLS: dict[str, tuple[Callable[[], Any], type[q4.Q4Error], str]] = {
    "session of a device name": (lambda: q4.Session("cpu"), q4.ConfigError, "SessionConfig"),  # type: ignore[arg-type]
    "m as a number": (lambda: q4.Session().linear(_weight(), m=5), q4.Q4Error, "m"),  # type: ignore[arg-type]
    "m as texts": (lambda: q4.Session().linear(_weight(), m=("1", "2")), q4.Q4Error, "m"),  # type: ignore[arg-type]
    "a list as bias": (lambda: q4.Session().linear(_weight(), [1.0] * N), q4.InputError, "bias"),  # type: ignore[arg-type]
    "explain a dict": (lambda: q4.explain({}), q4.InputError, "what"),  # type: ignore[arg-type]
    "dequantise a tensor": (lambda: q4.dequantize(torch.ones(2, 2)), q4.InputError, "weight"),  # type: ignore[arg-type]
    "quantise a list": (lambda: q4.quantize([1.0], "nf4"), q4.InputError, "dense"),  # type: ignore[arg-type]
    "rows of a list": (lambda: _layer().rows([1]), q4.InputError, "index"),  # type: ignore[arg-type]
    "open a number": (lambda: q4.open(5), q4.CheckpointError, "path"),  # type: ignore[arg-type]
    "linear of a dense weight": (lambda: q4.linear(X, torch.ones(N, K)), q4.InputError, "weight"),  # type: ignore[arg-type]
    "linear of a list": (lambda: q4.linear([1.0], _weight()), q4.InputError, "x"),  # type: ignore[arg-type]
    "linear with a float64 bias": (
        lambda: q4.linear(X, _weight(), torch.ones(N, dtype=torch.float64)),
        q4.InputError,
        "bias",
    ),
    "linear with a short bias": (lambda: q4.linear(X, _weight(), torch.ones(1)), q4.InputError, "bias"),
    "linear with a list as bias": (lambda: q4.linear(X, _weight(), [1.0]), q4.InputError, "bias"),  # type: ignore[arg-type]
    "select of a weight": (lambda: q4.select(_weight()), q4.ConfigError, "request"),  # type: ignore[arg-type]
    "using a text": (lambda: q4.using("cpu").__enter__(), q4.ConfigError, "SessionConfig"),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_a_wrong_argument_is_a_typed_error(call: str) -> None:
    """What people get wrong first is refused by name, never with an AttributeError from inside."""
    function, error, word = BAD_CALLS[call]
    with pytest.raises(error, match=word):
        function()


def test_a_row_out_of_range_is_named() -> None:
    """rows() says which index is wrong."""
    with pytest.raises(q4.InputError, match="99"):
        _layer().rows(torch.tensor([0, 99]))
    with pytest.raises(q4.InputError, match="-3"):
        _layer().rows(torch.tensor([[0, -3]]))


def test_a_plugins_format_runs_on_the_reference() -> None:
    """A format that a plugin adds is run by the fallback, saved and loaded, without any backend of its own."""
    import q4_dequant_fallback  # noqa: PLC0415  # found like any plugin; named here for tests only

    mine = q4.Format("mine", q4.Form.CODEBOOK, 4, 32, tuple(value / 15 - 0.5 for value in range(16)))
    plugins = q4.Registry([("a", plugin(q4_formats=lambda: [mine])), ("dequant-fallback", q4_dequant_fallback)])
    weight = attrs.evolve(_weight(), format=mine)
    layer = q4.Session(registry=plugins).linear(weight)
    torch.testing.assert_close(layer(X), X @ q4.dequantize(weight).T)
    twin = q4.Session(registry=plugins).linear(attrs.evolve(_weight(seed=4), format=mine))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(X), layer(X))


def test_the_input_gradient_has_a_gradient() -> None:
    """Double backward: the gradient to x is linear in the output's gradient, and its own gradient is exact."""
    layer = _layer(gradients=True)
    x = torch.randn(3, K, requires_grad=True)
    grad = torch.randn(3, N, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x), x, grad, create_graph=True)
    seed = torch.randn(3, K)
    (second,) = torch.autograd.grad(first, grad, seed)
    torch.testing.assert_close(second, seed @ q4.dequantize(_weight()).T)


def test_input_memory_is_recorded() -> None:
    """Under PREFER_UNIFIED without a provider, what became of x is counted in the record and sent as events."""
    heard: list[dict[str, Any]] = []

    def q4_event(event: str, fields: dict[str, Any]) -> None:
        if event == "q4.memory" and fields.get("kind") == "activation":
            heard.append(fields)

    import q4_dequant_fallback  # noqa: PLC0415  # found like any plugin; named here for tests only

    plugins = q4.Registry([("a", plugin(q4_event=q4_event)), ("dequant-fallback", q4_dequant_fallback)])
    config = q4.SessionConfig(unified_memory=q4.UnifiedMemoryPolicy.PREFER_UNIFIED)
    layer = q4.Session(config, registry=plugins).linear(_weight())
    layer(X)
    layer(X)
    (line,) = layer.diagnostics().input_memory
    assert "no plugin places tensors in unified memory" in line
    assert layer.diagnostics().input_memory[line] == 2
    assert len(heard) == 2


def test_diagnostics_off_sends_no_events() -> None:
    """SessionConfig(diagnostics=False) sends no event for its layers; the record is complete nevertheless."""
    heard: list[str] = []

    def q4_event(event: str, fields: dict[str, Any]) -> None:
        heard.append(event)

    plugins = q4.Registry([("a", plugin(FakeBackend(paths=(KERNEL_PATH,)), q4_event=q4_event))])
    layer = q4.Session(q4.SessionConfig(diagnostics=False), registry=plugins).linear(_weight())
    layer(X)
    assert heard == []
    assert layer.diagnostics().calls == (1,)
    assert layer.diagnostics().proven
    q4.Session(registry=plugins).linear(_weight())
    assert "q4.select" in heard


def test_a_strict_load_without_a_key_of_the_weight_keeps_the_bias() -> None:
    """A state dict that lacks part of the weight is refused whole: the bias stays, too."""
    for absent in ("weight.qdata", "weight.spec"):
        layer = _layer(torch.zeros(N))
        state = _layer(torch.ones(N)).state_dict()
        del state[absent]
        with pytest.raises(RuntimeError, match=absent):
            layer.load_state_dict(state)
        assert layer.bias is not None
        assert torch.equal(layer.bias, torch.zeros(N))
    layer.load_state_dict({"bias": torch.ones(N)}, strict=False)
    assert layer.bias is not None
    assert torch.equal(layer.bias, torch.ones(N))


def test_rows_of_a_flat_weight() -> None:
    """Row look-up works where blocks straddle rows."""
    weight = q4.quantize(torch.randn(31, 33, generator=torch.Generator().manual_seed(1)), "nf4")
    assert weight.blocks is q4.BlockOrder.FLAT
    index = torch.tensor([[3, 0], [30, 3]])
    rows = q4.Session(registry=registry()).linear(weight).rows(index)
    assert torch.equal(rows, q4.dequantize(weight)[index])


def test_a_compiled_layer_that_was_closed_says_so() -> None:
    """Later use of a closed layer's graph is the LifecycleError that eager use is."""
    layer = _layer()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(X)
    layer.close()
    with pytest.raises(Exception, match="closed"):
        compiled(X)


def test_a_layer_under_prefer_unified_compiles() -> None:
    """A graph leaves activations where they are, as PREFER_UNIFIED says; REQUIRE_UNIFIED is refused by name."""
    layer = _layer(unified_memory=q4.UnifiedMemoryPolicy.PREFER_UNIFIED)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(X), layer(X))
    config = attrs.evolve(layer._weight.config, unified_memory=q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED)
    layer._weight = attrs.evolve(layer._weight, config=config)
    for fullgraph in (True, False):
        with pytest.raises(Exception, match="can't place activations, as REQUIRE_UNIFIED asks"):
            torch.compile(layer, fullgraph=fullgraph, backend="eager")(torch.ones(5, K))


def test_events_carry_the_layers_name() -> None:
    """What is sent about a layer has the name that its record has."""
    heard: dict[str, Any] = {}

    def q4_event(event: str, fields: dict[str, Any]) -> None:
        heard[event] = fields.get("layer")

    import q4_dequant_fallback  # noqa: PLC0415  # found like any plugin; named here for tests only

    plugins = q4.Registry([("a", plugin(q4_event=q4_event)), ("dequant-fallback", q4_dequant_fallback)])
    layer = q4.Session(registry=plugins).linear(_weight(), name="proj")
    assert heard["q4.prepare"] == heard["q4.select"] == layer.diagnostics().layer == "proj"
    assert layer.packed_weight().name is None


def test_inputs_that_are_no_plain_memory_are_refused() -> None:
    """A sparse x, and an out whose elements share memory, are refused by name."""
    layer = _layer()
    with pytest.raises(q4.InputError, match="strided"):
        layer(X.to_sparse())
    with pytest.raises(q4.InputError, match="out"):
        layer(X, out=torch.zeros(1, N).expand(2, N))
