"""What a backend or plugin does wrong stays at its boundary: reported, typed, and never the caller's wrong number."""

from __future__ import annotations

import types
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4core.plugin_api import emit
from tests.support.events import forget_warnings
from tests.support.fakes import FakeBackend, plugin, registry

if TYPE_CHECKING:
    from collections.abc import Callable


def _weight(rows: int = 24, columns: int = 128) -> q4.PackedWeight:
    return q4.quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)), "nf4")


def _leave(*_: Any, **__: Any) -> Any:
    raise SystemExit("a plugin that exits")


@pytest.mark.filterwarnings("ignore::q4core.Q4ProbeWarning")
@pytest.mark.parametrize("method", ["check", "prepare", "linear", "export"])
def test_a_backend_that_exits_is_a_rejection(method: str) -> None:
    """SystemExit in any duty of a backend ends up as a reason, and the reference serves."""
    backend = FakeBackend("leaver")
    setattr(backend, method, _leave)
    record = q4.Session(registry=registry(backend)).linear(_weight()).diagnostics()
    assert record.backend == "dequant-fallback"
    assert "SystemExit" in str(record.rejections[0])


def test_a_raising_manifest_loses_only_its_own_backend() -> None:
    """A capabilities property that raises is refused with its reason; the other plugins' backends serve."""

    class Raising(FakeBackend):
        @property
        def capabilities(self) -> q4.Capabilities:
            raise RuntimeError("the driver is gone")

        @capabilities.setter
        def capabilities(self, value: q4.Capabilities) -> None:
            """Take what the constructor says."""

    plugins = registry(Raising("raising"), FakeBackend("healthy"))
    with pytest.warns(q4.Q4PluginWarning, match="driver is gone"):
        served = sorted(plugins.backends())
    assert served == ["dequant-fallback", "healthy"]
    (refused,) = plugins.invalid_backends()
    assert refused.name == "raising"
    assert "driver is gone" in refused.reason.message


def test_a_manifest_that_raises_later_is_a_rejection() -> None:
    """Capabilities that can be read at registration, but not when a layer asks, are a plugin_error rejection."""

    class Fading(FakeBackend):
        reads = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "capabilities":
                Fading.reads += 1
                if Fading.reads > 4:
                    raise RuntimeError("faded")
            return super().__getattribute__(name)

    plugins = registry(Fading("fading"))
    assert "fading" in plugins.backends()
    Fading.reads = 100
    selection = q4.select(q4.Request.for_weight(_weight()), registry=plugins)
    assert selection.backend == "dequant-fallback"
    assert "faded" in str(selection.rejections[0])


JUNK: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "no tensors": lambda: q4.Prepared(()),
    "a list": lambda: q4.Prepared([[1.0]]),  # type: ignore[list-item]
    "another device": lambda: q4.Prepared((torch.empty(4, device="meta"),)),
    "a sparse tensor": lambda: q4.Prepared((torch.eye(3).to_sparse(),)),
    "unhashable meta": lambda: q4.Prepared((torch.zeros(3),), []),
}


@pytest.mark.parametrize("junk", JUNK)
def test_a_junk_prepare_is_a_rejection(junk: str) -> None:
    """What prepare may not return is a plugin_error rejection, and the reference serves."""
    backend = FakeBackend("junk")
    backend.prepare = lambda *_: JUNK[junk]()  # type: ignore[method-assign]
    record = q4.Session(registry=registry(backend)).linear(_weight()).diagnostics()
    assert record.backend == "dequant-fallback"
    assert record.rejections[0].reasons[0].code is q4.ReasonCode.PLUGIN_ERROR


EXPORTS: dict[str, Callable[[q4.PackedWeight], Any]] = {
    "nothing": lambda _: None,
    "another shape": lambda weight: weight.narrow(0, 0, 5),
    "another format": lambda weight: q4.quantize(q4.dequantize(weight), "fp4"),
    "other codes": lambda weight: q4.quantize(-q4.dequantize(weight), "nf4"),
}


@pytest.mark.parametrize("junk", EXPORTS)
def test_a_wrong_export_disqualifies_its_backend(junk: str) -> None:
    """An export that is not the inverse of prepare is found before a state dict can be saved from it."""
    backend = FakeBackend("exporter")
    right = backend.export
    backend.export = lambda prepared, rows=None: EXPORTS[junk](right(prepared, None))
    weight = _weight()
    with pytest.warns(q4.Q4ProbeWarning, match="export"):
        layer = q4.Session(registry=registry(backend)).linear(weight)
    record = layer.diagnostics()
    assert record.backend == "dequant-fallback"
    assert record.rejections[0].reasons[0].code is q4.ReasonCode.PROBE_FAILED
    assert torch.equal(q4.dequantize(layer.packed_weight()), q4.dequantize(weight))


def test_a_wrong_export_is_reported_by_its_first_wrong_value() -> None:
    """The place in the weight, what the export says of it, and what the source does; of rows alone, too."""
    weight = _weight()
    exact = q4.dequantize(weight, torch.float64)
    backend = FakeBackend("exporter")
    right = backend.export
    backend.export = lambda prepared, rows=None: EXPORTS["other codes"](right(prepared, rows))
    told = rf"not the inverse of prepare: w\[0, 1\] = -\S+, the source's is {exact[0, 1]:.9g}"
    with pytest.warns(q4.Q4ProbeWarning, match=told):
        q4.Session(registry=registry(backend)).linear(weight)
    forget_warnings()
    backend.export = lambda prepared, rows=None: right(prepared, rows if rows is None else rows.flip(0))
    last = weight.out_features - 1
    told = rf"rows \[{last}, 0\] gives other values than those rows have: w\[0, \d+\] = .+, the source's is"
    with pytest.warns(q4.Q4ProbeWarning, match=told):
        q4.Session(registry=registry(backend)).linear(weight)


def test_an_export_that_turns_junk_later_is_a_typed_error() -> None:
    """After its probe, an export that returns something else raises BackendError that names the backend."""
    backend = FakeBackend("turncoat")
    layer = q4.Session(registry=registry(backend)).linear(_weight())
    backend.export = lambda prepared, rows=None: "junk"  # type: ignore[assignment, return-value]
    with pytest.raises(q4.errors.BackendError, match="turncoat"):
        layer.state_dict()


class Breaking(FakeBackend):
    """Right while it is probed, then raising ``error``."""

    error: BaseException | None = None

    def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
        """Compute, or raise as configured."""
        if self.error is not None:
            raise self.error
        super().linear(prepared, x, out, bias=bias, path=path)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("error", [SystemExit("leaving"), IndexError("out of range"), RuntimeError("CUDA error")])
def test_a_backend_that_breaks_while_it_serves_is_a_typed_error(error: BaseException, grad: bool) -> None:
    """What linear raises in a live layer comes out as BackendError with backend and path, and does not count."""
    backend = Breaking("breaking")
    layer = q4.Session(registry=registry(backend)).linear(_weight(), name="proj")
    backend.error = error
    x = torch.ones(2, 128, requires_grad=grad)
    with pytest.raises(q4.errors.BackendError, match=r"'breaking'.*fake_gemm.*" + type(error).__name__) as caught:
        layer(x)
    assert caught.value.__cause__ is error
    assert layer.diagnostics().calls == (0,)
    backend.error = None
    layer(x)
    assert layer.diagnostics().calls == (1,)


@pytest.mark.parametrize("error", [MemoryError("full"), torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_what_is_the_callers_to_handle_comes_through(error: BaseException) -> None:
    """Running out of memory, and an interrupt, reach the caller as they are, as from any module."""
    backend = Breaking("breaking")
    layer = q4.Session(registry=registry(backend)).linear(_weight())
    backend.error = error
    with pytest.raises(type(error)) as caught:
        layer(torch.ones(2, 128))
    assert caught.value is error


def _by_torch(weight: q4.PackedWeight) -> None:
    weight.qdata.bitwise_xor_(255)


def _by_address(weight: q4.PackedWeight) -> None:
    weight.qdata.numpy()[0, 0] ^= 255


@pytest.mark.parametrize("write", [_by_torch, _by_address])
def test_a_prepare_that_writes_to_the_callers_weight_is_an_error(write: Callable[[q4.PackedWeight], None]) -> None:
    """It raises, because the weight is damaged, whatever the probe says; and that backend is not asked again."""

    class Writer(FakeBackend):
        def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
            write(weight)
            return super().prepare(weight, request, context)

    session = q4.Session(registry=registry(Writer("writer")))
    with pytest.raises(q4.errors.BackendError, match=r"'writer'.*changed the caller's weight") as caught:
        session.linear(_weight())
    assert "again" in (caught.value.hint or "")
    record = session.linear(_weight()).diagnostics()
    assert record.backend == "dequant-fallback"
    assert "caller's weight" in str(record.rejections[0])


def test_a_proof_belongs_to_one_registry() -> None:
    """A wrong backend of a proven one's name, in another registry, is probed and found."""
    assert q4.Session(registry=registry(FakeBackend("same"))).linear(_weight()).diagnostics().backend == "same"
    with pytest.warns(q4.Q4ProbeWarning):
        wrong = q4.Session(registry=registry(FakeBackend("same", damage=torch.zeros_like))).linear(_weight())
    assert wrong.diagnostics().backend == "dequant-fallback"
    assert q4.Session(registry=registry(FakeBackend("same"))).linear(_weight()).diagnostics().backend == "same"


def test_the_record_is_of_what_was_prepared() -> None:
    """A check that changes its mind while a layer is made can't put another backend's name on it."""

    class Wavering(FakeBackend):
        def check(self, request: q4.Request) -> q4.Support:
            if self.requests:
                self.reasons = (q4.Reason(q4.ReasonCode.DRIVER, "gone"),)
            return super().check(request)

    layer = q4.Session(registry=registry(Wavering("wavering"))).linear(_weight())
    record = layer.diagnostics()
    assert record.backend == "wavering"
    assert record.proven
    x = torch.ones(2, 128)
    torch.testing.assert_close(layer(x), x @ q4.dequantize(_weight()).T)


def test_warnings_as_errors_do_not_spoil_the_registry() -> None:
    """With warnings as errors, a faulty plugin's warning is raised, and the next look sees every plugin as it is."""
    broken = types.ModuleType("broken")
    broken.q4_unheard_of = q4.hookimpl(lambda: ())  # type: ignore[attr-defined]
    plugins = q4.Registry([("a-broken", broken), ("b-healthy", plugin(FakeBackend("healthy")))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(q4.Q4PluginWarning, match="q4_unheard_of"):
            plugins.records()
        records = {record.name: record for record in plugins.records()}
    assert list(plugins.backends()) == ["healthy"]
    assert records["b-healthy"].errors == []
    assert len(records["a-broken"].errors) == 1


def test_an_observer_that_raises_is_reported_once() -> None:
    """q4_event that raises is recorded and warned of once, though it is called again; the others go on."""
    calls: list[str] = []
    heard: list[str] = []

    def q4_event(event: str, fields: dict[str, Any]) -> None:
        calls.append(event)
        raise ValueError("no")

    def listen(event: str, fields: dict[str, Any]) -> None:
        heard.append(event)

    plugins = q4.Registry([("bad", plugin(q4_event=q4_event)), ("good", plugin(q4_event=listen))])
    plugins.records()
    with pytest.warns(q4.Q4PluginWarning, match="q4_event raised ValueError"):
        emit("q4.select", layer="a")
    emit("q4.select", layer="b")
    assert calls == heard == ["q4.select", "q4.select"]
    assert len({record.name: record for record in plugins.records()}["bad"].errors) == 1


def test_a_forgotten_registry_hears_nothing() -> None:
    """Once a registry is no longer referenced, its observers are gone."""
    heard: list[str] = []

    def q4_event(event: str, fields: dict[str, Any]) -> None:
        heard.append(event)

    plugins = q4.Registry([("good", plugin(q4_event=q4_event))])
    plugins.records()
    emit("q4.select", layer="a")
    del plugins
    emit("q4.select", layer="b")
    assert heard == ["q4.select"]
