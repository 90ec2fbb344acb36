"""``Q4Linear`` and ``PackedWeight`` in other processes: sent to them, and shared with them."""

from __future__ import annotations

import copy
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.multiprocessing
from torch import nn

import q4core as q4
from tests.support.fakes import FakeBackend, registry
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

N, K = 48, 128
X = torch.randn(3, K, generator=torch.Generator().manual_seed(1))
CONTEXTS = {
    f"{library.__name__}-{method}": library.get_context(method)
    for library in (multiprocessing, torch.multiprocessing)
    for method in ("spawn", "forkserver")
}
BACKENDS = ("cpu-native", "dequant-fallback")  # a layout of its own, and the source's tensors as they came


def _weight(format_: str = "nf4", seed: int = 0) -> q4.PackedWeight:
    return q4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(seed)), format_)


def _model(backend: str, format_: str = "nf4") -> Any:
    session = q4.Session(q4.SessionConfig(backend=backend))
    return nn.Sequential(session.linear(_weight(format_), torch.ones(N)))


def _serve(first: Any, inbox: Any, outbox: Any) -> None:
    """Answer with y of the module that came as an argument, then of each that comes through the queue."""
    model: Any = None
    while first is not None:
        if isinstance(first, q4.PackedWeight):
            outbox.put(q4.dequantize(first).numpy().tobytes())
        else:
            if not isinstance(first, str):
                model = first
            elif first == "zero":
                model[0].packed_0.zero_()
            outbox.put(model(X).detach().numpy().tobytes())
        first = inbox.get()


class Child:
    """A process that answers; bytes go round, because a tensor is lost with the process that sent it."""

    def __init__(self, context: Any, first: Any) -> None:
        self._inbox, self._outbox = context.Queue(), context.Queue()
        self._process = context.Process(target=_serve, args=(first, self._inbox, self._outbox), daemon=True)
        self._process.start()

    def answer(self) -> bytes:
        """Return the next answer."""
        told: bytes = self._outbox.get(timeout=scaled(100))
        return told

    def send(self, item: Any) -> None:
        """Send one more."""
        self._inbox.put(item)

    def close(self) -> None:
        """End the process."""
        self._inbox.put(None)
        self._process.join(scaled(20))
        assert self._process.exitcode == 0


def _bytes(y: torch.Tensor) -> bytes:
    told: bytes = y.detach().numpy().tobytes()
    return told


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """The processes that a test starts, ended at its end."""
    started: list[Child] = []
    yield started
    for child in started:
        child.close()


@pytest.mark.parametrize("context", CONTEXTS)
def test_layers_reach_processes_that_share_no_memory(context: str, children: list[Child]) -> None:
    """As an argument and through a queue, a layer of either backend computes the same bits in the other process."""
    models = [_model(backend) for backend in BACKENDS]
    children.append(Child(CONTEXTS[context], models[0]))
    assert children[0].answer() == _bytes(models[0](X))
    for model in models:
        children[0].send(model)
        assert children[0].answer() == _bytes(model(X))


def test_views_of_a_weight_reach_a_spawned_process(children: list[Child]) -> None:
    """A weight whose tensors are views of larger storages arrives whole, as an argument and through a queue."""
    weight = _weight().narrow(0, 8, 16)
    expected = _bytes(q4.dequantize(weight))
    children.append(Child(CONTEXTS["multiprocessing-spawn"], weight))
    assert children[0].answer() == expected
    children[0].send(weight)
    assert children[0].answer() == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_share_memory_shares_the_packed_buffers(backend: str, method: str, children: list[Child]) -> None:
    """After ``share_memory`` all tensors are shared: what another process writes to them, every process computes."""
    model = _model(backend, "nvfp4")
    before = model(X)
    assert model.share_memory() is model
    assert all(tensor.is_shared() for tensor in (*model.buffers(), *model.parameters()))
    assert torch.equal(model(X), before)
    # A fork of torch's pool of threads hangs: the forked process shares what it inherited, and nothing is sent.
    if method == "fork":
        process = multiprocessing.get_context("fork").Process(target=model[0].packed_0.zero_)
        process.start()
        process.join(scaled(60))
        assert process.exitcode == 0
    else:
        children.append(Child(CONTEXTS["multiprocessing-spawn"], model))
        assert children[0].answer() == _bytes(before)
        children[0].send("zero")
        assert children[0].answer() != _bytes(before)
    assert not model[0].packed_0.any()
    assert not torch.equal(model(X), before)
    assert not any(buffer.is_shared() for buffer in copy.deepcopy(model).buffers())


def test_a_backend_of_another_registry_shares_too(children: list[Child]) -> None:
    """Which of a process's equal backends prepared a layer, the first or a later one, is nothing to other processes."""
    layers: list[Any] = [
        q4.Session(q4.SessionConfig(backend="dequant-fallback"), registry=registry()).linear(_weight())
        for _ in range(2)
    ]
    model = nn.Sequential(layers[1]).share_memory()
    children.append(Child(CONTEXTS["multiprocessing-spawn"], model))
    children[0].answer()
    children[0].send("zero")
    children[0].answer()
    assert not model.get_buffer("0.packed_0").any()


def test_a_load_reaches_those_who_share(children: list[Child]) -> None:
    """``load_state_dict`` writes a shared layer's weight in place, as it does a dense layer's."""
    model = _model("cpu-native").share_memory()
    children.append(Child(CONTEXTS["multiprocessing-spawn"], model))
    children[0].answer()
    other = nn.Sequential(q4.Session(q4.SessionConfig(backend="cpu-native")).linear(_weight(seed=3), torch.zeros(N)))
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(X), other(X))
    assert all(buffer.is_shared() for buffer in model.buffers())
    children[0].send("again")  # with the layer that it has
    assert children[0].answer() == _bytes(other(X))


def test_a_load_of_another_layout_into_a_shared_layer_is_refused() -> None:
    """A state that can't be written in place would leave the other processes behind: refused, nothing changed."""
    model = _model("cpu-native").share_memory()
    before = model(X)
    with pytest.raises(RuntimeError, match="shared"):
        model.load_state_dict(_model("cpu-native", "nvfp4").state_dict())
    assert torch.equal(model(X), before)
    assert all(buffer.is_shared() for buffer in model.buffers())


def test_a_backend_without_export_shares_too() -> None:
    """Where the source is stored next to the prepared tensors, both are shared."""
    layer = q4.Session(registry=registry(FakeBackend(exports=False))).linear(_weight())
    before = layer(X)
    layer.share_memory()
    assert all(buffer.is_shared() for buffer in layer.buffers())
    assert torch.equal(layer(X), before)
    assert torch.equal(layer.packed_weight().qdata, _weight().qdata)
