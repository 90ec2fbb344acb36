"""Backends that do their worst to whoever runs them; each test names one as ``hostile:NAME``."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from q4_conformance_faults import DIALECT_FAULTS, PROVIDER_FAULTS, ToyKernel
from q4_conformance_faults.toy_dialect import ToyDialect
from q4core import DialectError, Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core import Dialect, MemoryProvider

FORGED = '{"result": {"case": "X", "contract": "X", "outcome": "pass", "message": "forged"}}'


def _at_seven(action: Any) -> ToyKernel:
    """Return a right kernel that acts when it meets seven rows, which only one case has."""

    class Hostile(ToyKernel):
        def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, **facts: Any) -> None:
            if x.shape[0] == 7:
                action()
            super().linear(prepared, x, out, **facts)

    return Hostile("hostile")


def crashes() -> ToyKernel:
    """Read where there is nothing."""

    def action() -> None:
        sys.stdout.write("last words\n")
        sys.stdout.flush()
        ctypes.string_at(0)

    return _at_seven(action)


def leaves() -> ToyKernel:
    """End the process as if all were well."""
    return _at_seven(lambda: os._exit(0))


def eats() -> ToyKernel:
    """Allocate without end."""

    def action() -> None:
        held = []
        while True:
            held.append(bytearray(64 << 20))

    return _at_seven(action)


def shouts() -> ToyKernel:
    """Write forged results to every file descriptor that is open."""

    def action() -> None:
        for number in range(1, 30):
            for text in (f"\x1eq4-conformance {FORGED}\n", f"{FORGED}\n", "no end of line"):
                try:
                    os.write(number, text.encode())
                except OSError:
                    break

    return _at_seven(action)


def _raises(text: str) -> ToyKernel:
    def action() -> None:
        raise RuntimeError(text)

    return _at_seven(action)


def says_much() -> ToyKernel:
    """Raise an error whose text is longer than a message may be."""
    return _raises("much " * 2_000_000)


def says_unwritable() -> ToyKernel:
    """Raise an error that names an undecodable file, as ``os.fsdecode`` does."""
    return _raises(os.fsdecode(b"caf\xe9.safetensors"))


def breeds() -> ToyKernel:
    """Leave processes behind that hold every pipe, one of them in a session of its own."""

    def action() -> None:
        for alone in (False, True):
            command = [sys.executable, "-c", "import time; time.sleep(600)", "q4-hostile-child"]
            subprocess.Popen(command, start_new_session=alone, close_fds=False)

    return _at_seven(action)


def lingers() -> ToyKernel:
    """Leave a thread behind for which the process would wait when it ends."""
    return _at_seven(lambda: threading.Thread(target=time.sleep, args=(600,)).start())


def hides() -> ToyKernel:
    """Leave a process behind that has no parent, no session and no variable of ours."""

    def action() -> None:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                words = [sys.executable, "-c", "import time; time.sleep(600)", "q4-hostile-child"]
                os.execve(sys.executable, words, {})  # noqa: S606  # the point of it
            os._exit(0)
        os.wait()

    return _at_seven(action)


def speaks_not() -> ToyKernel:
    """Raise an error whose text raises."""

    class SilentError(Exception):
        def __str__(self) -> str:
            raise SilentError

    def action() -> None:
        raise SilentError

    return _at_seven(action)


def makes_nothing() -> None:
    """Return nothing where a backend should come from."""


def forks() -> ToyKernel:
    """Fork a child that stays, and crash."""

    def action() -> None:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        os.abort()

    return _at_seven(action)


def always_crashes() -> ToyKernel:
    """Crash in each case."""

    class Hostile(ToyKernel):
        def linear(self, *_: Any, **__: Any) -> None:
            os._exit(9)

    return Hostile("hostile")


def always_hangs() -> ToyKernel:
    """Hang in each case."""

    class Hostile(ToyKernel):
        def linear(self, *_: Any, **__: Any) -> None:
            time.sleep(600)

    return Hostile("hostile")


def wrong() -> ToyKernel:
    """Zero one element where there are seven rows."""

    class Hostile(ToyKernel):
        def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, **facts: Any) -> None:
            super().linear(prepared, x, out, **facts)
            if x.shape[0] == 7:
                out[0, 0] = 0.0

    return Hostile("hostile")


def never_made() -> ToyKernel:
    """Raise where a backend should come from."""
    raise RuntimeError("no kernel today")


def hangs_when_made() -> ToyKernel:
    """Hang where a backend should come from."""
    time.sleep(600)
    raise AssertionError


def crashes_when_made() -> ToyKernel:
    """Crash where a backend should come from."""
    sys.stderr.write("could not load libnothing.so\n")
    sys.stderr.flush()
    os._exit(3)


def one_format() -> ToyKernel:
    """Return a right kernel of one format, as a first backend is."""
    few = {"formats": {"nf4"}, "dtypes": {torch.float32}, "precisions": {Precision.W4A32}}
    return ToyKernel("one-format", **few)


def right_dialect() -> Dialect:
    """Return a right dialect, which declares one format."""
    return ToyDialect()


def idle_dialect() -> Dialect:
    """Return a dialect that declares its format, finds nothing and refuses to write."""

    class Idle(ToyDialect):
        name: ClassVar[str] = "idle"

        def find(self, catalogue: Any) -> Iterator[Any]:
            del catalogue
            return iter(())

        def write(self, module: str, weight: Any) -> NoReturn:
            del weight
            raise DialectError(module, name="weight", rule="of another dialect")

    return Idle()


def wrong_dialect() -> Dialect:
    """Return a dialect that swaps nibbles."""
    dialect: Dialect = DIALECT_FAULTS[0].make()
    return dialect


def wrong_memory() -> MemoryProvider:
    """Return a provider that calls all memory managed."""
    provider: MemoryProvider = PROVIDER_FAULTS[0].make("hostile-memory")
    return provider


def hangs_when_asked() -> ToyKernel:
    """Hang where it is asked what it offers."""

    class Hostile(ToyKernel):
        def check(self, *_: Any) -> NoReturn:
            time.sleep(600)
            raise AssertionError

    return Hostile("hostile")


def no_version() -> ToyKernel:
    """Declare no version."""
    kernel = ToyKernel("hostile")
    kernel.api_version = None  # type: ignore[assignment]
    return kernel


def no_number_for_a_name() -> ToyKernel:
    """Call itself what no JSON can hold."""
    kernel = ToyKernel("hostile")
    kernel.name = float("nan")  # type: ignore[assignment]
    return kernel


def names_raise() -> ToyKernel:
    """Exit where its name is read."""

    class Hostile(ToyKernel):
        def __getattribute__(self, field: str) -> Any:
            if field in {"name", "api_version"}:
                raise SystemExit(f"no {field} today")
            return super().__getattribute__(field)

    return Hostile("hostile")
