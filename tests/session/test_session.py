"""Sessions: lifetime, precedence of options, reports, isolation."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4
from tests.support.fakes import FakeBackend, registry

if TYPE_CHECKING:
    from collections.abc import Iterator

K = 128


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """End with the process's own session closed."""
    yield
    q4.default_session().close()


def _weight(name: str | None = None, rows: int = 32) -> q4.PackedWeight:
    return q4.quantize(torch.randn(rows, K, generator=torch.Generator().manual_seed(2)), "nf4", name=name)


def test_close_gives_every_byte_back_and_ends_the_layers() -> None:
    """After close the buffers are gone, and session and layers refuse with a LifecycleError."""
    session = q4.Session(registry=registry(FakeBackend()))
    layer = session.linear(_weight())
    buffers = [weakref.ref(buffer) for buffer in layer.buffers()]
    assert buffers
    with session:
        layer(torch.zeros(1, K))
    gc.collect()
    assert [reference() for reference in buffers] == [None] * len(buffers)
    for use in (
        lambda: layer(torch.zeros(1, K)),
        lambda: session.linear(_weight()),
        session.report,
        layer.state_dict,
        lambda: layer.rows(torch.tensor([0])),
        session.__enter__,
    ):
        with pytest.raises(q4.LifecycleError):
            use()
    session.close()


def test_layers_outlive_a_session_that_is_only_forgotten() -> None:
    """Without close, prepared weights live as long as the layers that use them."""
    layer = q4.Session(registry=registry()).linear(_weight())
    gc.collect()
    assert layer(torch.zeros(1, K)).shape == (1, 32)


def test_a_forgotten_layer_frees_its_bytes() -> None:
    """A session does not keep its layers alive."""
    session = q4.Session(registry=registry(FakeBackend()))
    layer = session.linear(_weight())
    buffer = weakref.ref(next(layer.buffers()))
    del layer
    gc.collect()
    assert buffer() is None
    assert session.report().layers == ()


def test_linear_caches_by_weight_and_weakly() -> None:
    """``q4.linear`` prepares once per weight, and lets go when the weight goes."""
    weight = _weight()
    x = torch.randn(2, K)
    first = q4.linear(x, weight)
    assert torch.equal(q4.linear(x, weight), first)
    session = q4.default_session()
    assert [sum(record.calls) for record in session.report().layers] == [2]
    assert torch.equal(q4.linear(x, weight, torch.ones(32)), first + 1)
    q4.linear(x.to(torch.bfloat16), weight)
    assert len(session.layers()) == 2
    del weight
    gc.collect()
    assert session.layers() == []


def test_linear_refuses_what_is_no_weight() -> None:
    """A dense tensor where a packed weight belongs is a typed error with a hint."""
    with pytest.raises(q4.InputError, match="PackedWeight"):
        q4.Session(registry=registry()).linear(torch.zeros(3, 3))  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64])
def test_linear_names_an_x_of_another_dtype(dtype: torch.dtype) -> None:
    """``q4.linear`` of integers or doubles is an error of x, with a hint, and prepares nothing."""
    with pytest.raises(q4.InputError, match=r"x must be of torch.*Use x\.to\(torch\.float32\)") as caught:
        q4.linear(torch.ones(2, K).to(dtype), _weight())
    assert (caught.value.name, caught.value.value) == ("x", dtype)


def test_precedence_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, then context, then environment, then default, each field for itself."""
    monkeypatch.setenv("Q4_COMPUTE_PATH", "dequant_matmul_only")
    monkeypatch.setenv("Q4_BACKEND", "from-env")
    with q4.using(q4.SessionConfig(backend="from-context", gradients=True)):
        config = q4.resolve_config(q4.SessionConfig(backend="from-argument"))
        assert config.backend == "from-argument"
        assert config.gradients is True
        assert config.compute_path is q4.ComputePath.DEQUANT_MATMUL_ONLY
        assert q4.resolve_config().backend == "from-context"
        with q4.using(q4.SessionConfig(gradients=False)):
            inner = q4.resolve_config()
            assert (inner.backend, inner.gradients) == ("from-context", False)
    assert q4.resolve_config().backend == "from-env"
    assert q4.resolve_config().device == "auto"


def test_the_unified_memory_policy_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4_UNIFIED_MEMORY ranks below argument and context and above the default; a bad value is named."""
    assert q4.resolve_config().unified_memory is q4.UnifiedMemoryPolicy.DISABLED
    monkeypatch.setenv("Q4_UNIFIED_MEMORY", "prefer_unified")
    assert q4.resolve_config().unified_memory is q4.UnifiedMemoryPolicy.PREFER_UNIFIED
    layer = q4.Session(registry=registry()).linear(_weight())
    assert all(line.startswith("fallback") for line in layer.diagnostics().memory)
    with q4.using(q4.SessionConfig(unified_memory="require_unified")):
        assert q4.resolve_config().unified_memory is q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED
        asked = q4.SessionConfig(unified_memory="disabled")
        assert q4.resolve_config(asked).unified_memory is q4.UnifiedMemoryPolicy.DISABLED
    monkeypatch.setenv("Q4_UNIFIED_MEMORY", "always")
    with pytest.raises(q4.ConfigError, match=r"Q4_UNIFIED_MEMORY must be one of .*'prefer_unified'"):
        q4.resolve_config()


def test_the_activation_precision_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4_PRECISION ranks below argument and context and above the default; a bad value is named."""
    monkeypatch.setenv("Q4_PRECISION", "exact")
    assert q4.resolve_config().activation_precision is q4.ActivationPrecision.EXACT
    with q4.using(q4.SessionConfig(activation_precision="int8")):
        assert q4.resolve_config().activation_precision is q4.ActivationPrecision.INT8
        asked = q4.SessionConfig(activation_precision="auto")
        assert q4.resolve_config(asked).activation_precision is q4.ActivationPrecision.AUTO
    monkeypatch.setenv("Q4_PRECISION", "best")
    with pytest.raises(q4.ConfigError, match=r"Q4_PRECISION must be one of .*'exact'"):
        q4.resolve_config()


@pytest.mark.usefixtures("reference_alone")
def test_using_takes_a_session_too() -> None:
    """``with q4.using(session)`` steers what is made inside."""
    session = q4.Session(q4.SessionConfig(compute_path="kernel_only"), registry=registry())
    with q4.using(session), pytest.raises(q4.BackendUnavailableError):
        q4.linear(torch.zeros(1, K), _weight())
    assert q4.linear(torch.zeros(1, K), _weight()).shape == (1, 32)
    with pytest.raises(q4.ConfigError), q4.using("kernel_only"):
        pass


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Q4_* variable with an illegal value is an error that names the variable."""
    monkeypatch.setenv("Q4_COMPUTE_PATH", "fast")
    with pytest.raises(q4.ConfigError) as caught:
        q4.Session(registry=registry())
    assert caught.value.name == "Q4_COMPUTE_PATH"
    assert "kernel_only" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "tpu"),
        ("device", 3),
        ("compute_path", "fast"),
        ("activation_precision", "int9"),
        ("unified_memory", "maybe"),
        ("compute_dtype", torch.int8),
        ("gradients", "yes"),
        ("backend", ""),
    ],
)
def test_bad_configuration_names_field_and_rule(field: str, value: object) -> None:
    """Each field refuses what it can't mean, with its name and the legal values."""
    with pytest.raises(q4.ConfigError) as caught:
        q4.SessionConfig(**{field: value})  # type: ignore[arg-type]  # on purpose
    assert caught.value.name == field
    assert caught.value.value == value
    assert isinstance(caught.value, ValueError)


def test_a_device_that_is_not_there_is_refused() -> None:
    """Asking for CUDA where torch sees none is a typed error, before anything is moved."""
    wanted = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    with pytest.raises(q4.ConfigError) as caught:
        q4.Session(q4.SessionConfig(device=wanted), registry=registry()).linear(_weight())
    assert str(caught.value).startswith(f"device {wanted!r} is not available: torch sees ")


def test_the_report_is_true_and_is_json() -> None:
    """The report has the five fields, every rejection and the counts per range of M, as text and as JSON."""
    paths = (
        q4.KernelPath("gemv", (1, 8), q4.PathKind.KERNEL, q4.Precision.W4A32, 30),
        q4.KernelPath("gemm", (9, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 20),
    )
    session = q4.Session(registry=registry(FakeBackend("k", paths=paths)))
    layer = session.linear(_weight("up"))
    for rows in (1, 1, 8, 9, 100, 0):
        layer(torch.zeros(rows, K))
    (record,) = session.report().layers
    assert record.calls == (3, 2)
    assert record.path_name == "gemv"
    data = json.loads(session.report().to_json())
    (told,) = data["layers"]
    assert [(path["name"], path["m"], path["calls"]) for path in told["paths"]] == [
        ("gemv", [1, 8], 3),
        ("gemm", [9, None], 2),
    ]
    for key in ("format", "backend", "compute_path", "path_name", "fallback_reason", "native_load_state", "rejections"):
        assert key in told
    assert told["rejections"][0]["reasons"][0]["code"] == "outranked"
    assert data["path_calls"] == {"k/gemv": 3, "k/gemm": 2}
    assert "up: nf4 32×128" in str(session.report())


def test_fallback_warns_once_and_is_recorded() -> None:
    """KERNEL_OR_FALLBACK without a kernel gives one warning and a reason in every record."""
    reason = q4.Reason(q4.ReasonCode.LIBRARY, "libfake is missing")
    session = q4.Session(
        q4.SessionConfig(compute_path="kernel_or_fallback"), registry=registry(FakeBackend("k", reasons=(reason,)))
    )
    with pytest.warns(q4.Q4FallbackWarning, match="libfake") as caught:
        layers = [session.linear(_weight(f"l{i}")) for i in range(3)]
    assert len(caught) == 1
    assert all("libfake is missing" in (layer.diagnostics().fallback_reason or "") for layer in layers)


def test_rows_outside_the_range_asked_for_are_refused() -> None:
    """A layer made for a range of M refuses other M with the range."""
    layer = q4.Session(registry=registry()).linear(_weight(), m=(2, 4))
    assert layer(torch.zeros(3, K)).shape == (3, 32)
    for rows in (1, 5):
        with pytest.raises(q4.InputError, match="between 2 and 4"):
            layer(torch.zeros(rows, K))


def test_sessions_share_no_state() -> None:
    """Closing one session leaves another one's layers alone."""
    plugins = registry(FakeBackend())
    one, two = q4.Session(registry=plugins), q4.Session(registry=plugins)
    weight = _weight()
    first, second = one.linear(weight), two.linear(weight)
    one.close()
    assert second(torch.zeros(1, K)).shape == (1, 32)
    assert not first.is_prepared


def test_threads_share_a_session() -> None:
    """Four threads through one layer give the same bits as one, and every call is counted."""
    session = q4.Session(registry=registry())
    layer = session.linear(_weight())
    x = torch.randn(4, K)
    expected = layer(x)
    wrong: list[int] = []

    def work(number: int) -> None:
        wrong.extend(number for _ in range(50) if not torch.equal(layer(x), expected))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert layer.diagnostics().calls == (201,)


def test_explain_names_layers_by_their_place() -> None:
    """``q4.explain(model)`` lists each layer under its name in the model."""
    session = q4.Session(registry=registry())
    model = torch.nn.Sequential(session.linear(_weight()), torch.nn.ReLU(), session.linear(_weight(rows=K)))
    assert [record.layer for record in q4.explain(model).layers] == ["0", "2"]
    assert len(q4.explain(session).layers) == 2
    assert str(q4.explain(torch.nn.ReLU())) == "no 4-bit layers"


@pytest.mark.parametrize("policy", [q4.UnifiedMemoryPolicy.DISABLED, q4.UnifiedMemoryPolicy.PREFER_UNIFIED])
def test_prefer_unified_without_a_provider_gives_the_same_numbers(policy: q4.UnifiedMemoryPolicy) -> None:
    """Without a provider, PREFER_UNIFIED leaves everything as it is, and says why."""
    x = torch.randn(2, K)
    layer = q4.Session(q4.SessionConfig(unified_memory=policy), registry=registry()).linear(_weight())
    assert torch.equal(layer(x), q4.Session(registry=registry()).linear(_weight())(x))
    told = layer.diagnostics().memory
    assert told == () if policy is q4.UnifiedMemoryPolicy.DISABLED else all("fallback" in line for line in told)


def test_require_unified_without_a_provider_fails_with_the_attributes() -> None:
    """REQUIRE_UNIFIED where it can't be met fails before anything is prepared, naming the device's facts."""
    backend = FakeBackend()
    session = q4.Session(q4.SessionConfig(unified_memory="require_unified"), registry=registry(backend))
    with pytest.raises(q4.UnifiedMemoryError) as caught:
        session.linear(_weight())
    assert caught.value.attributes
    assert backend.calls == []


def test_a_summary_holds_five_facts() -> None:
    """``summary`` states format, backend, compute path, fallback reason and native load state, and nothing else."""
    config = q4.SessionConfig(compute_path="kernel_or_fallback")
    session = q4.Session(config, registry=registry())
    with pytest.warns(q4.Q4FallbackWarning):
        record = session.linear(_weight(name="proj")).diagnostics()
    assert record.fallback_reason
    assert record.summary() == {
        "format": "nf4",
        "backend": "dequant-fallback",
        "compute_path": "kernel_or_fallback",
        "fallback_reason": record.fallback_reason,
        "native_load_state": record.native_load_state,
    }
    assert record.summary().items() <= record.to_dict().items()
