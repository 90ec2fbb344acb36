"""Code that does not compile or load becomes a typed error, and from then on a reason."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton_programs import RECIPES, factory_for

from q4_triton_kernels import Facts, Target, WeightOnlyBackend, program
from q4core import BackendError, PrepareContext, PrepareError, ReasonCode, Request

if TYPE_CHECKING:
    from collections.abc import Callable


class Plain(WeightOnlyBackend):
    """A backend of one format."""

    name = "plain"
    formats = frozenset({"nf4"})


class _Handle:
    """What Triton would return, with a driver that refuses the code."""

    def _init_handles(self) -> None:
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")


class _Compiled:
    handle = _Handle()


class _Unbuilt:
    class handle:  # noqa: N801  # an attribute's name
        @staticmethod
        def _init_handles() -> None:
            raise subprocess.CalledProcessError(1, ["gcc"])


def _refused(**_: Any) -> Any:
    raise ValueError("unsupported instruction")


@pytest.mark.parametrize(
    ("compiler", "code", "words"),
    [
        (lambda *_, **__: _Compiled(), ReasonCode.DRIVER, ("loaded by the driver", "image is invalid")),
        (lambda *_, **__: _Unbuilt(), ReasonCode.TOOLCHAIN, ("launcher", "gcc")),
        (lambda *_, **__: _refused(), ReasonCode.TOOLCHAIN, ("compiled by the installed Triton", "unsupported")),
    ],
    ids=["does not load", "has no launcher", "does not compile"],
)
def test_code_that_fails_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, compiler: Callable[..., Any], code: ReasonCode, words: tuple[str, ...]
) -> None:
    """``prepare`` refuses by the driver's fact or by the build's, names the kernel and gives the tool's own words."""
    monkeypatch.setattr(program, "compile_for", compiler)
    monkeypatch.setattr(type(driver), "active", _Driver())
    facts = Facts(
        torch_cuda="13.0",
        is_cuda_available=True,
        driver=13000,
        triton="3.7.1",
        capability=lambda index: (9, 0),
        processors=lambda index: 132,
    )
    backend = Plain(facts)
    weight = RECIPES["nf4"].build()
    request = Request.for_weight(weight, device="cuda:0", dtype=torch.bfloat16)
    assert not backend.check(request).reasons
    with pytest.raises(PrepareError) as caught:
        backend.prepare(weight, request, PrepareContext("cpu"))
    (reason,) = caught.value.reasons
    assert reason.code is code
    assert code.domain == ("hardware" if code is ReasonCode.DRIVER else "build")
    assert all(word in reason.message for word in (*words, "gemv"))


def test_a_capture_needs_loaded_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was not loaded refuses to launch within a capture: nothing is compiled there."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BackendError, match="loaded before a capture"):
        factory_for("nf4", torch.bfloat16, 90).finish((1, 1, 1))


class _Driver:
    """A driver of several devices with one stream each."""

    current = 3

    def get_current_device(self) -> int:
        return self.current

    def set_current_device(self, device: int) -> None:
        self.current = device

    def get_current_stream(self, device: int) -> int:
        return 1000 + device


class _Loaded:
    """Loaded code that notes what it is launched with."""

    function, packed_metadata = "function", "packed"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, *arguments: Any) -> None:
        pass

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


def test_a_launch_is_what_triton_would_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed Triton's own launch of compiled code passes the same arguments in the same order, hooks apart."""
    monkeypatch.setattr(type(driver), "active", _Driver())
    handle: Any = _Loaded()
    program._launcher(handle, ("constant", 7), 3)((5, 6, 1), 11, 22)
    CompiledKernel.__getitem__(handle, (5, 6, 1))(11, 22, "constant", 7)
    ours, theirs = handle.launches
    assert ours[:7] == theirs[:7] == (5, 6, 1, 1003, "function", "packed", None)
    assert ours[7:9] == (None, None)
    assert ours[9:] == theirs[9:] == (11, 22, "constant", 7)


def test_code_is_loaded_onto_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of device 1 is loaded there and launched on its stream, whichever device was the current one."""
    active = _Driver()
    monkeypatch.setattr(type(driver), "active", active)
    loaded_on: list[int] = []
    handle: Any = _Loaded()
    handle._init_handles = lambda: loaded_on.append(active.current)
    compiled: Any = type("Compiled", (), {"handle": handle})
    monkeypatch.setattr(program, "compile_for", lambda *_, **__: compiled)
    own = program.Program(_named, {}, {}, (), Target(90), 4, 1, device=1)
    own.load()
    own((1, 1, 1))
    assert (loaded_on, active.current) == ([1], 3)
    assert handle.launches[0][3] == 1001


def _named() -> None:
    """Stand for a kernel."""
