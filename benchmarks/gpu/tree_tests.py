"""The repository's own tests that need a CUDA device, in a process of pytest's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.deadline import Deadline

__all__ = ["run"]

_ROOT = Path(__file__).parents[2]
_FOLDERS = ("plugins/triton-kernels/tests", "plugins/nf4-cuda/tests", "plugins/nvfp4-native/tests", "tests")
_NOTHING_COLLECTED = 5


def _marked(folder: Path) -> list[Path]:
    """Return the files with tests that are marked: others may need packages that a machine with a GPU has not."""
    return [file for file in sorted(folder.rglob("test_*.py")) if "mark.gpu" in file.read_text(encoding="utf-8")]


def run(deadline: Deadline) -> dict[str, Any]:
    """Run the tests marked ``gpu`` folder by folder, and return how each run ended, with the end of what it printed."""
    found: dict[str, Any] = {"folders": {}, "left_out": []}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for folder in _FOLDERS:
        files = [str(file.relative_to(_ROOT)) for file in _marked(_ROOT / folder)]
        if not files:
            continue
        if deadline.is_over():
            found["left_out"].append(folder)
            continue
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *files]
        try:
            done = subprocess.run(  # noqa: S603  # pytest of this interpreter
                command, env=environment, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=deadline.left
            )
        except subprocess.TimeoutExpired:
            found["folders"][folder] = {"passed": False, "output": "no time was left"}
            continue
        lines = (done.stdout + done.stderr).splitlines()
        found["folders"][folder] = {
            "passed": done.returncode in {0, _NOTHING_COLLECTED},
            "exit_status": done.returncode,
            "output": "\n".join(lines[-40:]),
        }
        print(f"{folder}: {lines[-1] if lines else 'nothing was printed'}", flush=True)
    return found
