"""A backend that refuses while it prepares is refused with its own reasons, and is not asked again for the same."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.events import heard
from tests.support.fakes import KERNEL_PATH, FakeBackend, registry
from tests.support.pretended import DEVICE, pretended_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REASONS = (
    q4.Reason(q4.ReasonCode.TOOLCHAIN, "ptxas knows no sm_999"),
    q4.Reason(q4.ReasonCode.DRIVER, "the driver is of 2019"),
)
OR_FALLBACK = q4.SessionConfig(compute_path=q4.ComputePath.KERNEL_OR_FALLBACK)


def _weight(rows: int = 24, columns: int = 128, format_: str = "nf4") -> q4.PackedWeight:
    return q4.quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)), format_)


class Refusing(FakeBackend):
    """Refuses to prepare for weights as configured, and counts how often it was asked."""

    def __init__(
        self,
        name: str = "refusing",
        *,
        reasons_given: Any = REASONS,
        refuses: Callable[[q4.Request], bool] = lambda _: True,
        **facts: Any,
    ) -> None:
        super().__init__(name, **facts)
        self.reasons_given, self.refuses = reasons_given, refuses
        self.asked: list[q4.Request] = []

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        """Refuse, or copy the tensors."""
        self.asked.append(request)
        if self.refuses(request):
            raise q4.PrepareError(self.reasons_given)
        return super().prepare(weight, request, context)


def _reasons(rejections: Sequence[q4.Rejection], backend: str) -> tuple[q4.Reason, ...]:
    return next(item.reasons for item in rejections if item.backend == backend)


def test_a_refusal_keeps_its_reasons_and_the_next_backend_serves() -> None:
    """The record gives every reason with its own code, not plugin_error, and the numbers are right."""
    weight = _weight()
    layer = q4.Session(registry=registry(Refusing())).linear(weight)
    record = layer.diagnostics()
    assert record.backend == "dequant-fallback"
    assert _reasons(record.rejections, "refusing") == REASONS
    x = torch.ones(2, 128)
    torch.testing.assert_close(layer(x), x @ q4.dequantize(weight).T)


def test_the_next_kernel_is_asked_before_the_reference() -> None:
    """A refusal passes the request on to the backend that is next by tier."""
    low = FakeBackend("low", paths=(attrs.evolve(KERNEL_PATH, tier=11),))
    record = q4.Session(registry=registry(Refusing(), low)).linear(_weight()).diagnostics()
    assert record.backend == "low"
    assert _reasons(record.rejections, "refusing") == REASONS


def test_the_fallback_serves_under_kernel_or_fallback_and_says_why() -> None:
    """KERNEL_OR_FALLBACK: the reference serves, with a warning and a fallback reason that hold the refusal."""
    with pytest.warns(q4.Q4FallbackWarning, match="sm_999"):
        layer = q4.Session(OR_FALLBACK, registry=registry(Refusing())).linear(_weight())
    record = layer.diagnostics()
    assert record.backend == "dequant-fallback"
    assert all(str(reason) in (record.fallback_reason or "") for reason in REASONS)


@pytest.mark.parametrize("override", [None, "refusing"])
def test_kernel_only_is_an_error_with_that_reason(override: str | None) -> None:
    """KERNEL_ONLY: nothing replaces the kernel; the error carries the refusal's reasons, the second time as well."""
    config = q4.SessionConfig(compute_path=q4.ComputePath.KERNEL_ONLY, backend=override)
    backend = Refusing()
    session = q4.Session(config, registry=registry(backend))
    for _ in range(2):
        with pytest.raises(q4.BackendUnavailableError, match="sm_999") as caught:
            session.linear(_weight())
        assert _reasons(caught.value.rejections, "refusing") == REASONS
    assert len(backend.asked) == 1


def test_a_refusal_is_remembered_for_its_kind() -> None:
    """The same kind of weight and call is not asked again, and select says so at once; another format is asked."""
    backend = Refusing(refuses=lambda request: request.format.name == "nf4")
    plugins = registry(backend)
    session = q4.Session(registry=plugins)
    assert session.linear(_weight()).diagnostics().backend == "dequant-fallback"
    assert session.linear(_weight()).diagnostics().backend == "dequant-fallback"
    assert len(backend.asked) == 1
    known = q4.select(q4.Request.for_weight(_weight()), registry=plugins)
    assert known.backend == "dequant-fallback"
    assert _reasons(known.rejections, "refusing") == REASONS
    assert session.linear(_weight(format_="fp4")).diagnostics().backend == "refusing"


def test_a_refusal_for_some_paths_leaves_the_others() -> None:
    """A backend that can't prepare its w4i16 path is asked again where the exact one is wanted."""
    paths = (KERNEL_PATH, attrs.evolve(KERNEL_PATH, name="fake_i16", precision=q4.Precision.W4I16, tier=30))
    backend = Refusing(paths=paths, refuses=lambda request: request.precision is q4.ActivationPrecision.AUTO)
    plugins = registry(backend)
    assert q4.Session(registry=plugins).linear(_weight()).diagnostics().backend == "dequant-fallback"
    exact = q4.SessionConfig(activation_precision=q4.ActivationPrecision.EXACT)
    assert q4.Session(exact, registry=plugins).linear(_weight()).diagnostics().backend == "refusing"
    assert len(backend.asked) == 2


def test_a_refusal_belongs_to_one_registry() -> None:
    """A backend of the same name in another registry is asked."""
    assert q4.Session(registry=registry(Refusing("same"))).linear(_weight()).diagnostics().backend != "same"
    assert q4.Session(registry=registry(FakeBackend("same"))).linear(_weight()).diagnostics().backend == "same"


@pytest.mark.parametrize("junk", [(), ("no room",), None, "no room"])
def test_a_refusal_without_reasons_is_a_plugin_error(junk: Any) -> None:
    """What is raised without a Reason says nothing, and is reported as the plugin's fault; it is not remembered."""
    backend = Refusing(reasons_given=junk)
    session = q4.Session(registry=registry(backend))
    for _ in range(2):
        record = session.linear(_weight()).diagnostics()
        assert record.backend == "dequant-fallback"
        assert [reason.code for reason in _reasons(record.rejections, "refusing")] == [q4.ReasonCode.PLUGIN_ERROR]
    assert len(backend.asked) == 2


def test_a_refusal_is_reported_as_an_event() -> None:
    """q4.prepare says which backend refused and why, and mentions no error."""
    with heard("q4.prepare") as events:
        q4.Session(registry=registry(Refusing())).linear(_weight(), name="proj")
    (told,) = (fields for fields in events if fields["backend"] == "refusing")
    assert told["layer"] == "proj"
    assert told["refused"] == [str(reason) for reason in REASONS]
    assert "error" not in told


def test_a_refusal_crosses_process_borders_whole() -> None:
    """The error is a BackendError with its reasons in its message, and survives pickling."""
    error = q4.PrepareError(REASONS)
    assert isinstance(error, q4.BackendError)
    assert all(str(reason) in str(error) for reason in REASONS)
    twin = pickle.loads(pickle.dumps(error))  # noqa: S301  # made here
    assert twin.reasons == REASONS
    assert str(twin) == str(error)


def test_a_refusal_of_one_weight_holds_for_no_other() -> None:
    """Where a refusal comes from a weight's own numbers, the backend is asked again for the next weight of its kind."""

    class Picky(Refusing):
        def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
            if weight.name == "odd":
                raise q4.PrepareError(REASONS[:1], is_for_this_weight=True)
            return FakeBackend.prepare(self, weight, request, context)

    session = q4.Session(registry=registry(Picky("picky")))
    odd = session.linear(attrs.evolve(_weight(), name="odd")).diagnostics()
    assert odd.backend == "dequant-fallback"
    assert _reasons(odd.rejections, "picky") == REASONS[:1]
    assert session.linear(_weight()).diagnostics().backend == "picky"
    assert session.linear(attrs.evolve(_weight(), name="odd")).diagnostics().backend == "dequant-fallback"


def test_a_refusal_of_one_weight_crosses_processes() -> None:
    """Pickled, it says the same."""
    error = pickle.loads(pickle.dumps(q4.PrepareError(REASONS, is_for_this_weight=True)))  # noqa: S301  # own bytes
    assert (error.reasons, error.is_for_this_weight) == (REASONS, True)
    assert not q4.PrepareError(REASONS).is_for_this_weight


def test_a_backend_that_spoils_a_moved_copy_is_barred_and_the_next_one_gets_another() -> None:
    """The caller's weight is whole, and what the next backend is given on the device is read from it again."""

    class Spoiling(FakeBackend):
        def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
            weight.qdata.zero_()
            return super().prepare(weight, request, context)

    devices = {"cpu", "cuda"}
    low = FakeBackend("low", paths=(attrs.evolve(KERNEL_PATH, tier=11),), devices=devices)
    weight = _weight()
    with pretended_cuda():
        session = q4.Session(
            q4.SessionConfig(device=DEVICE), registry=registry(Spoiling("spoiling", devices=devices), low)
        )
        layer = session.linear(weight)
        assert layer.diagnostics().backend == "low"
        y = layer(torch.ones(2, 128).to(DEVICE)).cpu()
    torch.testing.assert_close(y, torch.ones(2, 128) @ q4.dequantize(weight).T)
