"""The FP4 paths on a CPU: the CUDA C++ kernels compiled by g++ over an emulator, behind the real driver and library code."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from q4_nvfp4_native import Nvfp4Native
from q4_nvfp4_native.compiler import Compiled
from q4_nvfp4_native.configurations import CUDA_FOLDER
from q4_nvfp4_native.driver import Driver
from q4_nvfp4_native.library import Search, find_library
from q4_nvfp4_native.native import Tools
from q4_triton_kernels import Facts

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BLACKWELL", "build", "emulated_backend", "emulated_library", "set_manner"]

NATIVE_FOLDER = Path(__file__).with_name("native")
BLACKWELL = Facts(
    torch_cuda="13.0", is_cuda_available=True, driver=13000, triton="3.7.1", capability=lambda index: (12, 1)
)
"""A machine with a GB10."""
_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-clobbered", "-shared", "-fPIC")


def build(source: str, name: str, *, define: str = "Q4_EMULATED", folders: tuple[Path, ...] = ()) -> Path:
    """Compile one C++ (or C) file of the tests' folder into a shared library and return its path."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    folder = Path(tempfile.mkdtemp(prefix="q4-nvfp4-"))
    target = folder / f"lib{name}.so"
    includes = [f"-I{item}" for item in (*folders, NATIVE_FOLDER, CUDA_FOLDER)]
    command = [compiler, *_FLAGS, f"-D{define}", *includes, str(NATIVE_FOLDER / source), "-o", str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
    return target


@functools.cache
def emulated_library() -> Path:
    """Return the library that is both libNVFP4.so and the CUDA driver."""
    return build("emulated.cpp", "NVFP4emulated")


def mutated_library(changes: Mapping[str, tuple[str, str]]) -> Path:
    """Return that library with one text of each named kernel file replaced by another."""
    folder = Path(tempfile.mkdtemp(prefix="q4-nvfp4-mutant-"))
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


def emulated_backend(library: Path | None = None, *, external: bool = False, arch: int = 121) -> Nvfp4Native:
    """Return the backend on CPU tensors, with kernels launched through the driver's ABI or the external library's."""
    path = emulated_library() if library is None else library
    tools = Tools(
        nvrtc_problem=lambda _: "no NVRTC in this test" if external else None,
        nvrtc_version=lambda: "emulated",
        compile=lambda *_: Compiled("emulated", "", b"emulated"),
        driver=lambda: Driver(ctypes.CDLL(str(path))),
        library=lambda: find_library([str(path)]) if external else Search(None, ()),
        stream=lambda _: 0,
    )
    facts = attrs.evolve(BLACKWELL, capability=lambda _: divmod(arch, 10))
    return Nvfp4Native(facts, tools, devices=("cpu",))
