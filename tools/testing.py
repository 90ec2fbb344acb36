"""Tests that need no GPU and no other 4-bit library: ``python -m tools.testing``, or some of them with arguments.

Each test runs once. Those of Triton's kernels run in its interpreter, and those of the CPU kernels' paths on AVX2, too.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.native import CROSS_TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["OF_PATHS", "PAGES", "PEERS", "commands", "marks"]

PAGES = "tests/repository"
"""Tests of pages, stored results and benchmarks, which a session of their own runs: ``nox -s pages``."""
PEERS = ["tests/peers", "plugins/transformers/tests/peers"]
"""Tests that compare with other libraries, which pytest enters only where they are named: ``nox -s peers``."""
KERNELS = ["plugins/nf4-cuda", "plugins/nvfp4-native", "plugins/triton-kernels"]
OF_PATHS = ["tests", *(f"plugins/{name}" for name in ("cli", "cpu-native", "lm", "nn", "programs", "snn"))]
"""Folders whose tests depend on the paths of the CPU kernels."""
_ELSEWHERE = ["browser", "soak", "gpu", "interpreted", "peer", "training"]
_DEBIAN = "apt install g++-aarch64-linux-gnu qemu-user-static"
_CORES = os.cpu_count() or 1


def _shared(workers: int) -> list[str]:
    return ["-n", str(min(8, workers)), "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "40"]


def marks() -> str:
    """Return the marks of the tests to run here, for pytest's ``-m``; in CI, none is left out for a missing tool."""
    unwanted = [*_ELSEWHERE]
    if not all(map(shutil.which, CROSS_TOOLS)) and not os.environ.get("CI"):
        print(f"the kernels for Arm are not tested; Debian: {_DEBIAN}", file=sys.stderr)
        unwanted.append("arm")
    return " and ".join(f"not {mark}" for mark in unwanted)


def commands(chosen: Sequence[str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Return the arguments of ``python -m`` one after another, with the variables that each needs."""
    runnable = marks()
    if chosen:
        yield ["pytest", "-m", runnable, *chosen], {}
        return
    yield ["tests.support.native"], {}  # on all cores, before workers take them
    shared = _shared(_CORES + 2)  # a fifth of the time, tests wait for other processes; those below do not
    yield ["pytest", "-m", runnable, "--ignore", PAGES, *shared], {}
    yield ["pytest", "-m", "interpreted and not soak", *KERNELS, *_shared(_CORES)], {"TRITON_INTERPRET": "1"}
    if platform.machine() in {"x86_64", "AMD64"}:
        paths = ["--ignore", PAGES, *OF_PATHS, *_shared(_CORES)]
        yield ["pytest", "-m", f"isa and not slow and {runnable}", *paths], {"Q4_CPU_ISA": "avx2"}


def main() -> int:
    """Run everything, so that one report names all that fails; return the first status that is not 0."""
    statuses = [
        subprocess.run([sys.executable, "-m", *arguments], env={**os.environ, **variables}, check=False).returncode
        for arguments, variables in commands(sys.argv[1:])
    ]
    return next(filter(None, statuses), 0)


if __name__ == "__main__":
    sys.exit(main())
