"""The FP4 paths on a CPU: the CUDA C++ kernels compiled by g++ over an emulator, behind the real launching code."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from q4_nvfp4_native import Nvfp4Native
from q4_nvfp4_native.compiler import Compiled
from q4_nvfp4_native.configurations import CUDA_FOLDER
from q4_nvfp4_native.driver import Driver
from q4_nvfp4_native.library import find_library
from q4_nvfp4_native.native import Tools
from q4_triton_kernels import Facts

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BLACKWELL",
    "emulated_backend",
    "emulated_library",
    "emulated_tools",
    "fake_library",
    "mutated_library",
    "set_manner",
]

NATIVE_FOLDER = Path(__file__).with_name("native")
BLACKWELL = Facts(
    torch_cuda="13.0",
    is_cuda_available=True,
    driver=13000,
    triton="3.7.1",
    capability=lambda index: (12, 1),
    processors=lambda index: 48,
)
"""A machine with a GB10."""
_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-clobbered", "-shared", "-fPIC")


def _folder() -> Path:
    """Return a new folder, which goes when the process ends."""
    folder = tempfile.mkdtemp(prefix="q4-nvfp4-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def build(
    source: str, name: str, *, defines: tuple[str, ...] = ("Q4_EMULATED",), folders: tuple[Path, ...] = ()
) -> Path:
    """Compile one C++ (or C) file of the tests' folder into a shared library and return its path."""
    is_c = source.endswith(".c")
    compiler = os.environ.get("CC" if is_c else "CXX") or shutil.which("gcc" if is_c else "g++") or "c++"
    flags = ("-std=gnu11", *_FLAGS[1:]) if is_c else _FLAGS
    target = _folder() / f"lib{name}.so"
    includes = [f"-I{item}" for item in (*folders, NATIVE_FOLDER, CUDA_FOLDER)]
    command = [
        compiler,
        *flags,
        *(f"-D{item}" for item in defines),
        *includes,
        str(NATIVE_FOLDER / source),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
    return target


@functools.cache
def emulated_library() -> Path:
    """Return the library that is both libNVFP4.so and the CUDA driver."""
    return build("emulated.cpp", "NVFP4emulated")


@functools.cache
def fake_library(*faults: str) -> Path:
    """Return a libNVFP4.so with some faults, over the emulated one."""
    return build("fake_library.c", "NVFP4fake", defines=(f'FAKE_REAL="{emulated_library()}"', *faults))


def mutated_library(changes: Mapping[str, tuple[str, str]]) -> Path:
    """Return that library with one text of each named kernel file replaced by another."""
    folder = _folder()
    for file in CUDA_FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        if file.name in changes:
            old, new = changes[file.name]
            if text.count(old) != 1:
                raise AssertionError(f"{old!r} must be in {file.name} once, is {text.count(old)} times")
            text = text.replace(old, new)
        (folder / file.name).write_text(text, encoding="utf-8")
    return build("emulated.cpp", "NVFP4mutant", folders=(folder,))


def set_manner(library: Path, *, early_copies: bool, backwards: bool) -> None:
    """Say how the emulator behaves where the hardware leaves it open."""
    ctypes.CDLL(str(library)).emulator_set(int(early_copies), int(backwards))


def emulated_tools(*libraries: Path, driver: bool = True) -> Tools:
    """Return tools whose driver is the emulator (or that have no NVRTC), with some external libraries to look among."""
    return Tools(
        nvrtc_problem=lambda _: None if driver else "no NVRTC in this test",
        nvrtc_version=lambda: "emulated",
        compile=lambda *_: Compiled("emulated", "", b"emulated"),
        driver=lambda: Driver(ctypes.CDLL(str(emulated_library()))),
        library=lambda: find_library(map(str, libraries)),
        stream=lambda _: 0,
    )


def emulated_backend(*libraries: Path, driver: bool = True, **tools: Any) -> Nvfp4Native:
    """Return the backend on CPU tensors: kernels launched through the driver's ABI or an external library's.

    Args:
        *libraries: External libraries to look among.
        driver: Whether there is NVRTC.
        **tools: Other tools than the emulated ones.
    """
    own = attrs.evolve(emulated_tools(*libraries, driver=driver), **tools)
    return Nvfp4Native(BLACKWELL, own, devices=("cpu",))
