"""Compilation of the CUDA C++ kernels by NVRTC, through CuPy's binding, with the machine code cached on disk.

NVRTC comes with torch's CUDA wheels, so nothing here depends on which Triton torch pins, and no CUDA toolkit is needed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import tempfile
from importlib import util
from pathlib import Path
from typing import Any

import attrs

from q4_nvfp4_native.configurations import CUDA_FOLDER
from q4core import BackendError

__all__ = ["NATIVE_ARCHITECTURES", "Compiled", "compile_kernels", "nvrtc_problem", "nvrtc_version", "source"]

NATIVE_ARCHITECTURES = (120, 121)
"""Compute capabilities × 10 whose tensor cores multiply FP4 by ``mma.sync`` with block scales."""
_INCLUDE = re.compile(r'#include "([\w.]+)"\n')
_OPTIONS = ("-std=c++17", "--fmad=false")
"""No fused multiply-add: codes must not depend on what a compiler fuses."""
_ELF_ALIGNMENT = 8


@attrs.frozen(eq=False)
class Compiled:
    """The kernels of one format for one architecture."""

    arch: str
    ptx: str = attrs.field(repr=False)
    cubin: bytes = attrs.field(repr=False)


@functools.cache
def source() -> str:
    """Return the kernels as one text, with every header in its place."""
    done: set[str] = set()

    def expand(name: str) -> str:
        text = (CUDA_FOLDER / name).read_text(encoding="utf-8")
        if "#pragma once" in text:
            if name in done:
                return ""
            done.add(name)
            text = text.replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda found: found[0] if found[1] == "emulator.hpp" else expand(found[1]), text)

    return expand("kernels.cuh")


@functools.cache
def _nvrtc() -> Any:
    """Return CuPy's binding of NVRTC."""
    if util.find_spec("cupy") is None:
        raise BackendError("NVRTC", hint="Install CuPy (q4-nvfp4-native[cuda13]), which finds NVRTC next to torch.")
    try:
        from cupy.cuda import nvrtc  # noqa: PLC0415  # slow, and may be missing

        nvrtc.getVersion()
    except Exception as error:  # CuPy raises what its loader raises where a library is missing
        raise BackendError(f"NVRTC can't be loaded: {type(error).__name__}: {error}") from error
    return nvrtc


def nvrtc_version() -> str:
    """Return NVRTC's version.

    Raises:
        BackendError: CuPy or NVRTC is missing.
    """
    return ".".join(map(str, _nvrtc().getVersion()))


def nvrtc_problem(arch: int) -> str | None:
    """Return why NVRTC can't compile for an architecture, or None."""
    try:
        nvrtc = _nvrtc()
    except BackendError as error:
        return str(error)
    if arch not in nvrtc.getSupportedArchs():
        return f"NVRTC {nvrtc_version()} makes no code for sm_{arch}; 12.9 and newer do"
    return None


def compile_kernels(format_name: str, arch: int) -> Compiled:
    """Return the kernels of a format for an architecture, from the cache on disk where they are there.

    Args:
        format_name: ``"nvfp4"`` or ``"mxfp4"``.
        arch: Compute capability × 10; where it has no block-scaled ``mma.sync``, the quantiser alone is compiled.

    Raises:
        BackendError: NVRTC is missing or refuses the source.
    """
    is_native = arch in NATIVE_ARCHITECTURES
    target = f"sm_{arch}a" if is_native else f"sm_{arch}"
    other = "Q4_NO_MXFP4" if format_name == "nvfp4" else "Q4_NO_NVFP4"
    options = (f"-arch={target}", *_OPTIONS, f"-D{other}", *(() if is_native else ("-DQ4_NO_GEMM",)))
    key = hashlib.sha256(repr((source(), options, nvrtc_version())).encode()).hexdigest()
    known = _read(key)
    if known is not None:
        return Compiled(target, *known)
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source(), f"q4_{format_name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        ptx, cubin = nvrtc.getPTX(program), nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise BackendError(f"NVRTC can't compile the {format_name} kernels for {target}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    # CuPy takes the last byte for a text's terminator; an ELF file ends at a multiple of eight, with a zero.
    machine = cubin + bytes(-len(cubin) % _ELF_ALIGNMENT)
    _write(key, text, machine)
    return Compiled(target, text, machine)


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "q4core" / "nvfp4-native"


def _digest(text: str, machine: bytes) -> bytes:
    return hashlib.sha256(text.encode() + b"\0" + machine).digest()


def _read(key: str) -> tuple[str, bytes] | None:
    """Return what ``_write`` stored under a key; None where it is not there, or not whole."""
    try:
        stored = (_folder() / key).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    text, separator, machine = stored[32:].partition(b"\0")
    if not separator or _digest(text.decode(errors="replace"), machine) != stored[:32]:
        return None
    return text.decode(), machine


def _write(key: str, text: str, machine: bytes) -> None:
    """Store PTX and machine code; where nothing can be written, the next process compiles again."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(_digest(text, machine) + text.encode() + b"\0" + machine)
        Path(file.name).replace(folder / key)
