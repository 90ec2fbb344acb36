"""What a plugin raised: reported with its place in the author's code, and the cause of the error that comes of it."""

from __future__ import annotations

import gc
import json
import logging
import re
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4core.diagnostics.describe_exception import describe_exception
from tests.support.events import forget_warnings, observed_by
from tests.support.fakes import FakeBackend, registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KERNELS = """\
import json, torch
import q4core as q4

def by_hand(y):
    return [][3]

def by_torch(y):
    return torch.zeros(2) @ torch.zeros(3)

def by_core(y):
    return q4.find_format("nf5")

def by_library(y):
    return json.loads("{")
"""


@pytest.fixture(autouse=True)
def _forget() -> None:
    """Let every warning be given again."""
    forget_warnings()


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stranger's module in a package."""
    package = tmp_path / "q4_stranger"
    (package / "native").mkdir(parents=True)
    (package / "__init__.py").write_text("def first(y):\n    raise ValueError('at the top')\n")
    (package / "native" / "__init__.py").write_text("")
    (package / "native" / "kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    from q4_stranger.native import kernels  # type: ignore[import-not-found]  # noqa: PLC0415  # written above

    yield kernels
    for name in [name for name in sys.modules if name.split(".")[0] == "q4_stranger"]:
        del sys.modules[name]


def _weight() -> q4.PackedWeight:
    return q4.quantize(torch.randn(40, 128, generator=torch.Generator().manual_seed(3)), "nf4", name="proj")


def _only(backend: FakeBackend) -> q4.Session:
    return q4.Session(q4.SessionConfig(backend=backend.name), registry=registry(backend))


@pytest.mark.parametrize(("function", "line"), [("by_hand", 5), ("by_torch", 8), ("by_core", 11), ("by_library", 14)])
def test_a_fault_is_reported_with_its_place_in_the_authors_code(kernels: Any, function: str, line: int) -> None:
    """File, line and function of the innermost frame that is not the core's, torch's or the standard library's."""
    with pytest.raises((IndexError, RuntimeError, q4.FormatError, json.JSONDecodeError)) as caught:
        getattr(kernels, function)(None)
    told = describe_exception(caught.value)
    assert (
        told == f"{type(caught.value).__name__}: {caught.value} (in q4_stranger/native/kernels.py:{line}, {function})"
    )


def test_a_place_names_no_directory_of_the_machine(kernels: Any, tmp_path: Path) -> None:
    """A package's own file is reported with its name, a single module's without its folder's."""
    with pytest.raises(ValueError, match="at the top") as caught:
        sys.modules["q4_stranger"].first(None)
    assert describe_exception(caught.value).endswith("(in q4_stranger/__init__.py:2, first)")
    (tmp_path / "q4_alone.py").write_text("raise OSError('no')")
    with pytest.raises(OSError, match="no") as alone:
        import q4_alone  # type: ignore[import-not-found]  # noqa: F401, PLC0415  # written above
    assert describe_exception(alone.value) == "OSError: no (in q4_alone.py:1, <module>)"


def test_an_error_without_a_place_or_a_text_is_reported_all_the_same() -> None:
    """One that was never raised has no place; one whose text raises is reported by its kind."""

    class Mute(Exception):  # noqa: N818  # a stranger's
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert describe_exception(KeyError("x")) == "KeyError: 'x'"
    assert describe_exception(Mute()) == "Mute, whose text raises RuntimeError"


def test_a_path_that_raises_in_its_probe_says_where(kernels: Any) -> None:
    """The warning and the error name the place, the second time too, when the path is not tried again."""
    session = _only(FakeBackend("stranger", damage=kernels.by_hand))
    place = "q4_stranger/native/kernels.py:5, by_hand"
    told = re.escape(f"path fake_gemm raised IndexError: list index out of range (in {place}) at M = 1")
    with pytest.warns(q4.Q4ProbeWarning, match=told), pytest.raises(q4.BackendUnavailableError, match=told):
        session.linear(_weight())
    with pytest.raises(q4.BackendUnavailableError, match=told):
        session.linear(_weight())


@pytest.mark.parametrize("method", ["check", "prepare"])
def test_a_method_that_raises_is_reported_with_its_place(kernels: Any, method: str) -> None:
    """What check or prepare raised is reported with its place."""
    backend = FakeBackend("stranger")
    setattr(backend, method, lambda *_: kernels.by_hand(None))
    told = f"{method} raised IndexError: list index out of range (in q4_stranger/native/kernels.py:5, by_hand)"
    with pytest.raises(q4.BackendUnavailableError, match=re.escape(told)):
        _only(backend).linear(_weight())


@pytest.mark.parametrize("holds_itself", [False, True])
def test_a_fault_keeps_no_tensor_alive(holds_itself: bool) -> None:
    """What a failed prepare had made is freed before the next backend prepares: there may be no room for both."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Greedy(FakeBackend):
        def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
            half = torch.zeros(1000)
            made.append(weakref.ref(half))
            if holds_itself:
                error = RuntimeError("no room")  # a frame that holds its own exception is freed by the collector alone
                raise error
            raise MemoryError("no room")

    class Next(FakeBackend):
        def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
            alive.append(made[0]() is not None)
            return super().prepare(weight, request, context)

    gc.disable()
    try:
        layer = q4.Session(registry=registry(Greedy("greedy"), Next("next"))).linear(_weight())
    finally:
        gc.enable()
    assert layer.diagnostics().backend == "next"
    assert alive == [False]


def test_a_fault_is_an_event_with_its_traceback(kernels: Any, caplog: pytest.LogCaptureFixture) -> None:
    """q4.fault, at debug level, says which backend and has the traceback."""
    heard: list[dict[str, Any]] = []

    def hear(event: str, fields: dict[str, Any]) -> None:
        if event == "q4.fault":
            heard.append(fields)

    with observed_by(hear), caplog.at_level(logging.DEBUG, logger="q4core"), pytest.warns(q4.Q4ProbeWarning):
        q4.Session(registry=registry(FakeBackend("stranger", damage=kernels.by_hand))).linear(_weight())
    (fields,) = heard
    assert fields["backend"] == "stranger"
    assert fields["error"].startswith("IndexError: ")
    assert "return [][3]" in fields["traceback"]
    (record,) = [item for item in caplog.records if getattr(item, "q4_event", None) == "q4.fault"]
    assert record.levelno == logging.DEBUG


def test_a_native_quantiser_that_raises_says_where(kernels: Any) -> None:
    """Its probe says where, and so does the error of who asked for it."""
    path = q4.KernelPath.quantizer("quantize")
    backend = FakeBackend("native", paths=(path,), ops={"quantize"}, roundings=frozenset(q4.Rounding))
    backend.quantize = lambda *_, **__: kernels.by_hand(None)  # type: ignore[attr-defined]
    told = re.escape("(in q4_stranger/native/kernels.py:5, by_hand)")
    with pytest.warns(q4.Q4ProbeWarning, match=told), pytest.raises(q4.BackendUnavailableError, match=told):
        q4.quantize(torch.ones(4, 64), "nf4", rounding="stochastic", registry=registry(backend))


def test_a_live_layer_says_where(kernels: Any) -> None:
    """A call that fails after its proof names the place, too, and so does one whose error has no text."""

    class Mute(Exception):  # noqa: N818  # a stranger's
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def mute(_: torch.Tensor) -> torch.Tensor:
        raise Mute

    backend = FakeBackend("stranger")
    layer = _only(backend).linear(_weight())
    backend.damage = kernels.by_hand
    with pytest.raises(q4.BackendError, match=re.escape("(in q4_stranger/native/kernels.py:5, by_hand)")):
        layer(torch.ones(1, 128))
    backend.damage = mute
    with pytest.raises(
        q4.BackendError, match=r"raised Mute, whose text raises RuntimeError \(in \S*test_fault_places.py:\d+, mute\)"
    ):
        layer(torch.ones(1, 128))


def test_a_hook_that_raises_says_where(kernels: Any) -> None:
    """What doctor shows of a hook, and of a module that can't be imported, names the place."""
    plugins = q4.Registry([("stranger", _Hooked(kernels))])
    with pytest.warns(q4.Q4PluginWarning, match=re.escape("q4_stranger/native/kernels.py:5, by_hand")):
        plugins.backends()


class _Hooked:
    """A plugin whose hook raises."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    @q4.hookimpl
    def q4_backends(self) -> list[Any]:
        return [self.kernels.by_hand(None)]
