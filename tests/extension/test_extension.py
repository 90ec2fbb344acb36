"""The public seam: handles on layers, probes that run once, and records in reports."""

from __future__ import annotations

import copy
import gc
import json
import types
import warnings
import weakref
from typing import TYPE_CHECKING, ClassVar

import attrs
import pytest
import torch

import q4core as q4
from q4core.extension import LayerHandle, Record, attach_record, prove_once, record_of, records_of, watch
from tests.support.fakes import FakeBackend

if TYPE_CHECKING:
    from collections.abc import Callable

N, K = 40, 96


@attrs.define(eq=False)
class Uses(Record):
    """A record of a library that a stranger wrote."""

    section: ClassVar[str] = "uses"

    name: str
    count: int = 0

    def __str__(self) -> str:
        """Return the record as a line."""
        return f"{self.name}: used {self.count} ×"


def registry_of(backend: FakeBackend) -> q4.Registry:
    """Return a registry with one backend."""
    return q4.Registry([("given", types.SimpleNamespace(q4_backends=q4.hookimpl(lambda: [backend])))])


def layer_of(registry: q4.Registry | None = None, *, bias: bool = True) -> q4.Q4Linear:
    """Return a layer that a fake backend prepared."""
    weight = q4.quantize(torch.randn(N, K), "nf4")
    config = q4.SessionConfig(device="cpu", activation_precision="exact")
    registry = registry or registry_of(FakeBackend())
    return q4.Q4Linear(weight, torch.randn(N) if bias else None, config=config, registry=registry, name="layer")


def test_a_handle_has_what_the_backend_takes() -> None:
    """By the backend and what it prepared a library computes what the layer computes, with the same bits."""
    layer, x = layer_of(), torch.randn(3, K)
    handle = LayerHandle(layer)
    index = handle.segment_index(3)
    assert index is not None
    y = torch.empty(3, N)
    assert handle.bias is not None
    handle.backend.linear(handle.prepared, x, y, bias=handle.bias.detach(), path=handle.segments[index].path.name)
    assert torch.equal(y, layer(x).detach())
    assert torch.equal(q4.dequantize(handle.weight()), q4.dequantize(layer.packed_weight()))
    assert [tensor.data_ptr() for tensor in handle.tensors] == [tensor.data_ptr() for tensor in handle.prepared.tensors]
    assert (handle.device, handle.is_managed) == (torch.device("cpu"), False)
    assert handle.registry.backends()["fake"] is handle.backend


def test_layers_of_one_kind() -> None:
    """Kinds are equal for layers that a backend runs in the same way, and differ where the format does."""
    registry = registry_of(FakeBackend())
    other = q4.Q4Linear(q4.quantize(torch.randn(N, K), "q4_0"), registry=registry, name="other")
    kinds = [LayerHandle(layer).kind for layer in (layer_of(registry), layer_of(registry), other)]
    assert kinds[0] == kinds[1] != kinds[2]


def _replace_bias(layer: q4.Q4Linear) -> None:
    layer.bias = torch.nn.Parameter(torch.zeros(N))


@pytest.mark.parametrize(
    "change",
    [
        q4.Q4Linear.close,
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict())),
        lambda layer: layer.adopt(q4.quantize(torch.randn(N, K), "nf4")),
        _replace_bias,
    ],
    ids=["close", "to", "load", "adopt", "bias"],
)
def test_a_handle_says_when_the_layer_changed(change: Callable[[q4.Q4Linear], object]) -> None:
    """Whatever lets the layer run by something else ends the handle; calls do not."""
    layer = layer_of()
    handle = LayerHandle(layer)
    are_current = watch([LayerHandle(layer_of()), handle])
    layer(torch.randn(2, K))
    assert [handle.is_current, are_current()] == [True, True]
    change(layer_of())  # another one
    assert [handle.is_current, are_current()] == [True, True]
    change(layer)
    assert [handle.is_current, are_current(), watch([handle])()] == [False, False, False]


def test_a_bias_that_a_layer_gets_ends_its_handle() -> None:
    """A layer without a bias is watched, too, and so is one whose bias is computed."""
    plain = q4.Q4Linear(q4.quantize(torch.randn(N, K), "nf4"))
    computed = layer_of()
    torch.nn.utils.parametrize.register_parametrization(computed, "bias", torch.nn.Identity())
    for layer in (plain, computed):
        are_current = watch([LayerHandle(layer), LayerHandle(layer_of())])
        assert are_current()
        if layer is computed:
            torch.nn.utils.parametrize.remove_parametrizations(layer, "bias")
        else:
            _replace_bias(layer)
        assert not are_current()


def test_a_layer_without_a_weight_has_no_handle() -> None:
    """A closed layer, and one that waits for its weight, are refused as their calls are."""
    layer = layer_of()
    layer.close()
    with pytest.raises(q4.LifecycleError, match="layer 'layer' is closed"):
        LayerHandle(layer)
    with pytest.raises(q4.LifecycleError, match="has no weight yet"):
        LayerHandle(q4.Q4Linear.empty(N, K))


def test_uses_are_counted_but_for_trials() -> None:
    """What a library adds is in the layer's report; what a trial ran is not, though it failed."""
    layer = layer_of()
    handle = LayerHandle(layer)
    handle.calls[0] += 2
    handle.add_outlier_rows(5)
    with pytest.raises(RuntimeError, match="trial"), handle.uncounted():  # noqa: PT012  # the block is the subject
        layer(torch.randn(2, K))
        handle.add_outlier_rows(1)
        raise RuntimeError("trial")
    found = layer.diagnostics()
    assert (sum(found.calls), found.outlier_rows) == (2, 5)


def test_a_kind_is_proven_once() -> None:
    """A probe runs once for a registry, backend, purpose and kind, and not in inference mode; a fault is warned of."""
    backend, ran = FakeBackend(), list[str]()
    registries = registry_of(backend), registry_of(backend)

    def probe(name: str, fault: str | None = None) -> Callable[[], str | None]:
        def run() -> str | None:
            ran.append(name)
            assert not torch.is_inference_mode_enabled()
            return fault

        return run

    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for number, registry in enumerate(registries):
                assert prove_once(registry, backend, "sums", "a", probe(f"sums a {number}")) is None
            assert prove_once(registries[0], backend, "sums", "b", probe("sums b")) is None
            assert prove_once(registries[0], backend, "other", "a", probe("other a")) is None
    assert sorted(ran) == ["other a", "sums a 0", "sums a 1", "sums b"]
    with pytest.warns(q4.Q4ProbeWarning, match="backend 'fake' is not used for sums: all wrong here"):
        assert prove_once(registries[0], backend, "sums", "c", probe("sums c", "all wrong here")) == "all wrong here"
    assert prove_once(registries[0], backend, "sums", "c", probe("again")) == "all wrong here"
    assert "again" not in ran


def test_a_probe_that_raises_is_not_remembered() -> None:
    """An error of the probe comes through, and the next use probes again."""
    registry, backend = registry_of(FakeBackend()), FakeBackend()

    def broken() -> str | None:
        raise MemoryError

    with pytest.raises(MemoryError):
        prove_once(registry, backend, "sums", "a", broken)
    assert prove_once(registry, backend, "sums", "a", lambda: None) is None


def test_results_are_forgotten_with_the_registry() -> None:
    """What a probe showed does not keep the plugins alive."""
    backend = FakeBackend()
    registry = registry_of(backend)
    gone = weakref.ref(registry)
    prove_once(registry, backend, "sums", "a", lambda: None)
    del registry
    gc.collect()
    assert gone() is None


def test_records_are_a_section_of_reports() -> None:
    """A record is in the text and JSON of each report with one of its layers, once, as it is then."""
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        layers = [session.linear(q4.quantize(torch.randn(N, K), "nf4"), name=name) for name in ("a", "b", "c")]
        record = Uses("pair")
        attach_record(record, layers[:2])
        record.count = 3
        assert session.report().section("uses") == (record,)
        assert session.report().section("others") == ()
        assert "pair: used 3 ×" in str(session.report())
        assert json.loads(session.report().to_json())["uses"] == [{"name": "pair", "count": 3}]
        assert q4.explain(layers[1]).records == (record,)
        assert q4.explain(layers[2]).records == ()
        assert "uses" not in q4.explain(layers[2]).to_dict()


def test_records_of_a_name_replace_one_another() -> None:
    """A layer has one record of a section and name, which can be asked for."""
    layer = layer_of()
    first, second, other = Uses("first"), Uses("second"), Uses("other")
    for record, name in ((first, ""), (second, ""), (other, "other")):
        attach_record(record, [layer], name=name)
    assert record_of(layer, "uses") is second
    assert record_of(layer, "uses", name="other") is other
    assert record_of(layer, "spikes") is None
    assert records_of([layer, layer]) == (second, other)


def test_records_end_with_their_layer() -> None:
    """A record keeps no layer alive, and a copy of the layer begins without."""
    layer = layer_of()
    attach_record(Uses("one"), [layer])
    assert records_of([copy.deepcopy(layer)]) == ()
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
