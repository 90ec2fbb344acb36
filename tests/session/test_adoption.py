"""``export_prepared`` and ``adopt_prepared``: prepared layers leave their process and come back, or are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import q4core as q4
from tests.support.fakes import FakeBackend, registry

FORMATS = ("nf4", "q4_1", "mxfp4", "int4")


class Describing(FakeBackend):
    """A backend that can describe its layout."""

    def describe(self, meta: q4.WeightSpec) -> dict[str, Any]:
        """Return the spec as what JSON holds."""
        facts: dict[str, Any] = json.loads(meta.to_json())
        return facts

    def meta_from(self, facts: dict[str, Any]) -> q4.WeightSpec:
        """Return the spec that was described."""
        return q4.WeightSpec.from_json(json.dumps(facts))


def told(layer: q4.Q4Linear) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Return a layer as another process would read it."""
    header, tensors = q4.export_prepared(layer)
    return json.loads(json.dumps(header)), tensors


def made(backend: Any = None, **options: Any) -> q4.Q4Linear:
    """Return a small layer of a backend, or of the installed ones."""
    weight = q4.quantize(torch.randn(48, 128, generator=torch.Generator().manual_seed(3)), "q4_1")
    plugins = None if backend is None else registry(backend)
    return q4.Session(q4.SessionConfig(**options), registry=plugins).linear(weight, name="up")


@pytest.mark.parametrize("backend", ["cpu-native", "dequant-fallback"])
@pytest.mark.parametrize("format_", FORMATS)
def test_an_adopted_layer_is_the_same_layer(backend: str, format_: str) -> None:
    """It computes the same bits over the same memory, and exports, saves and reports the same weight."""
    config = q4.SessionConfig(backend=backend, compute_path="auto")
    bias = torch.randn(48)
    layer = q4.Session(config).linear(q4.quantize(torch.randn(48, 128), format_), bias=bias, name="up")
    header, tensors = told(layer)
    session = q4.Session(config, registry=q4.Registry())
    twin = q4.adopt_prepared(header, tensors, session, bias=bias)
    for rows in (1, 3, 50):
        x = torch.randn(rows, 128)
        assert torch.equal(layer(x), twin(x))
    assert [item.data_ptr() for item in q4.export_prepared(twin)[1]] == [item.data_ptr() for item in tensors]
    state, other = layer.state_dict(), twin.state_dict()
    assert all(torch.equal(state[key].view(torch.uint8), other[key].view(torch.uint8)) for key in state)
    assert torch.equal(layer.rows(torch.tensor([47, 0])), twin.rows(torch.tensor([47, 0])))
    assert session.layers() == [twin]
    assert twin.diagnostics().proven
    assert twin.name == "up"
    session.close()
    with pytest.raises(q4.LifecycleError):
        twin(torch.randn(1, 128))


@pytest.mark.parametrize("gradients", [False, True])
def test_blocks_across_rows_and_gradients_are_adopted_too(*, gradients: bool) -> None:
    """What can't be exported by rows is probed on all of its values."""
    config = q4.SessionConfig(backend="dequant-fallback", compute_path="auto", gradients=gradients)
    dense = torch.randn(48, 100)
    weight = q4.quantize(dense, "nf4", block_size=64, scale_kind=q4.ScaleKind.DOUBLE_QUANT)
    layer = q4.Session(config).linear(weight)
    twin = q4.adopt_prepared(*told(layer), q4.Session(config, registry=q4.Registry()))
    x = torch.randn(3, 100)
    assert torch.equal(layer(x), twin(x))


def test_the_first_of_a_kind_is_probed_and_no_other() -> None:
    """An adopted weight runs each path once before it serves; the second of its kind does not, in this process."""
    header, tensors = told(made(Describing()))
    backend = Describing()
    session = q4.Session(registry=registry(backend))
    q4.adopt_prepared(header, tensors, session)
    probed = list(backend.calls)
    assert probed == [("fake_gemm", 1)]
    q4.adopt_prepared(header, tensors, session)
    assert backend.calls == probed
    session.linear(q4.quantize(torch.randn(48, 128), "q4_1"))
    assert len(backend.calls) > len(probed) + 1, "a weight that this process prepares is probed in full all the same"


def test_wrong_numbers_are_refused() -> None:
    """A backend that computes wrong numbers here may not serve what it prepared elsewhere."""
    header, tensors = told(made(Describing("wrong elsewhere")))
    backend = Describing("wrong elsewhere", damage=lambda y: y + 1)
    with pytest.warns(q4.Q4ProbeWarning, match="fake_gemm"), pytest.raises(q4.LifecycleError, match="wrong numbers"):
        q4.adopt_prepared(header, tensors, q4.Session(registry=registry(backend)))


def test_a_layer_of_a_backend_without_describe_stays() -> None:
    """Without describe, meta_from and export there is nothing to export, and the error says what to do."""
    for backend in (FakeBackend(), Describing(exports=False)):
        with pytest.raises(q4.LifecycleError, match="does not describe its layout") as caught:
            q4.export_prepared(made(backend))
        assert "packed_weight" in str(caught.value)


def test_a_layer_that_is_not_prepared_is_not_exported() -> None:
    """A closed layer, and one on the meta device, are errors."""
    layer = made()
    layer.close()
    empty = q4.Q4Linear(q4.quantize(torch.randn(48, 128), "q4_1").to("meta"))
    for item in (layer, empty):
        with pytest.raises(q4.LifecycleError):
            q4.export_prepared(item)


def changed(**facts: Any) -> Any:
    """Return a change of a header: its plan names other facts."""

    def change(header: dict[str, Any]) -> dict[str, Any]:
        name, _, text = header["plan"].partition(" ")
        return {"plan": f"{name} {json.dumps(json.loads(text) | facts)}"}

    return change


HEADERS: dict[str, Any] = {
    "another version": lambda _: {"version": 3},
    "another plan": lambda header: {"plan": "cpu-native/0123456789abcdef " + header["plan"].partition(" ")[2]},
    "a plan without facts": lambda header: {"plan": header["plan"].partition(" ")[0]},
    "no plan": lambda _: {"plan": None},
    "a backend that is not there": changed(backend="elsewhere"),
    "a backend that does not serve it here": changed(backend="dequant-fallback"),
    "another layout": changed(meta={"layout": 0}),
    "no layout": changed(meta=None),
    "another shape": lambda _: {"tensors": [{"dtype": "uint8", "shape": [1]}]},
    "no tensors": lambda _: {"tensors": []},
    "no dtype": changed(dtype="float33"),
    "something of torch that is no dtype": changed(dtype="nn"),
    "a feature that nobody knows": changed(features=["telepathy"]),
    "rows that are none": changed(m=[0, None]),
    "half a range": changed(m=[1]),
    "no spec": changed(spec={}),
    "notes that are none": lambda _: {"notes": 3},
}


@pytest.mark.parametrize("damage", HEADERS)
def test_a_header_that_does_not_fit_is_refused(damage: str) -> None:
    """Whatever is wrong with a header is one kind of error, which says what to do; the session keeps no layer."""
    header, tensors = told(made())
    session = q4.Session()
    with pytest.raises(q4.LifecycleError, match="cannot reuse prepared layer") as caught:
        q4.adopt_prepared({**header, **HEADERS[damage](header)}, tensors, session)
    assert "Prepare the layer from its weight" in str(caught.value)
    assert not session.layers()


def test_a_backend_that_is_not_selected_here_is_named() -> None:
    """The error says who prepared the layer, and who is selected here."""
    header, tensors = told(made())
    session = q4.Session(q4.SessionConfig(backend="dequant-fallback"))
    prepared, selected = json.loads(header["plan"].partition(" ")[2])["backend"], "dequant-fallback"
    pattern = f"prepared layer 'up': it was prepared by backend '{prepared}', but '{selected}' is selected here"
    with pytest.raises(q4.LifecycleError, match=pattern):
        q4.adopt_prepared(header, tensors, session)


@pytest.mark.parametrize("key", sorted(told(made())[0]))
def test_a_header_without_a_part_is_refused_or_needs_it_not(key: str) -> None:
    """Name, dialect and notes are for people; without any other part nothing is reused."""
    header, tensors = told(made())
    rest = {name: value for name, value in header.items() if name != key}
    if key in {"name", "dialect", "notes"}:
        assert q4.adopt_prepared(rest, tensors, q4.Session()).is_prepared
        return
    with pytest.raises(q4.LifecycleError, match="cannot reuse prepared layer"):
        q4.adopt_prepared(rest, tensors, q4.Session())


def test_tensors_that_do_not_fit_are_refused() -> None:
    """Too few, of another dtype, shorter or with gaps: nothing is read."""
    header, tensors = told(made())
    first = tensors[0]
    gaps = torch.empty(2 * first.numel(), dtype=first.dtype)[::2]
    for bad in ((), (first.view(torch.int8),), (first[:-1],), (gaps,)):
        with pytest.raises(q4.LifecycleError, match="its tensors are"):
            q4.adopt_prepared(header, (*bad, *tensors[1:]) if bad else (), q4.Session())


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": "bfloat16"},
        {"activation_precision": "exact"},
        {"compute_path": "dequant_matmul_only"},
        {"unified_memory": "prefer_unified"},
    ],
)
def test_another_session_asks_for_something_else(options: dict[str, Any]) -> None:
    """What was prepared for int8 activations of float32 serves no session that asks for anything else."""
    header, tensors = told(made(activation_precision="int8"))
    with pytest.raises(q4.LifecycleError, match="cannot reuse prepared layer"):
        q4.adopt_prepared(header, tensors, q4.Session(q4.SessionConfig(**{"activation_precision": "int8"} | options)))


def test_a_closed_session_adopts_nothing() -> None:
    """The session is asked first."""
    header, tensors = told(made())
    session = q4.Session()
    session.close()
    with pytest.raises(q4.LifecycleError, match="session is closed"):
        q4.adopt_prepared(header, tensors, session)


def test_a_moved_or_copied_adopted_layer_goes_its_own_way() -> None:
    """Another dtype prepares it again from what the backend exports; the tensors it was made of stay as they are."""
    header, tensors = told(made())
    before = [item.clone() for item in tensors]
    layer = q4.adopt_prepared(header, tensors, q4.Session())
    moved = layer.to(torch.bfloat16)
    assert moved(torch.randn(2, 128, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(before, tensors, strict=True))
