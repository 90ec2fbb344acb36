"""Builds the native test program of cpu-native, once for each kind: ``python -m tests.support.native`` those of CI."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["CROSS_TOOLS", "SOURCE", "build", "folder_of", "tool"]

SOURCE = Path(__file__).parents[2] / "plugins/cpu-native"
CROSS_TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")
_COMMON = "-O1 -g1 -fno-sanitize-recover=all -DQ4_CPU_STALL_NS=1000000000000"
"""However slow threads are here, they share the work."""
_ALONE = "-DQ4_CPU_TESTS=ON"
_OPTIONS = {
    "plain": [f"-DPython_EXECUTABLE={sys.executable}"],
    "address": [_ALONE, f"-DQ4_CPU_TEST_FLAGS={_COMMON} -fsanitize=address,undefined -fno-omit-frame-pointer"],
    "thread": [_ALONE, f"-DQ4_CPU_TEST_FLAGS={_COMMON} -fsanitize=thread", "-DQ4_CPU_STD_THREADS=ON"],
    "aarch64": [_ALONE, f"-DCMAKE_TOOLCHAIN_FILE={SOURCE / 'native/tests/aarch64.cmake'}"],
}


def tool(name: str) -> str:
    """Return a program of this environment, or else of the system."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    way_out = "Debian: apt install g++-aarch64-linux-gnu qemu-user-static; or deselect these tests: -m 'not arm'"
    assert found, f"{name} is needed for the native tests{f'; {way_out}' if name in CROSS_TOOLS else ''}"
    return found


def folder_of(kind: str) -> Path:
    """Return where a program is built: the plain one where the module was, so that its kernels are compiled once."""
    if kind == "plain":
        installed = sorted((SOURCE / "build").glob(f"cp{sys.version_info.major}{sys.version_info.minor}-*"))
        return (*installed, SOURCE / "build/native-tests/plain")[0]
    return SOURCE / "build/native-tests" / kind


@functools.cache
def build(kind: str) -> Path:
    """Build the program, or bring it up to date, and return where it is. Arm's kernels take two minutes of a core."""
    folder = folder_of(kind)
    options = [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE=Release", *_OPTIONS[kind]]
    for command in (
        [tool("cmake"), "-S", str(SOURCE), "-B", str(folder), "-G", "Ninja", *options],
        [tool("cmake"), "--build", str(folder), "--target", "q4_cpu_tests"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "native/tests/q4_cpu_tests"


if __name__ == "__main__":
    for name in ("plain", *(["aarch64"] if all(map(shutil.which, CROSS_TOOLS)) else [])):
        try:
            build(name)
        except AssertionError as error:  # the tests of the kernels fail with it, and the others go on
            sys.stderr.write(f"{error}\n")
