"""The repository's own tests that need a CUDA device, in a process of pytest's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.deadline import Deadline

__all__ = ["FOLDERS", "command", "files_of", "run"]

_ROOT = Path(__file__).parents[2]
FOLDERS = (
    "plugins/triton-kernels/tests",
    "plugins/nf4-cuda/tests",
    "plugins/nvfp4-native/tests",
    "plugins/um-managed/tests",
    "plugins/actors/tests",
    "plugins/snn/tests",
    "tests",
)
_NOTHING_COLLECTED = 5
_MARK = re.compile(r"^(@|pytestmark = .*)pytest\.mark\.gpu", re.MULTILINE)


def _marked(folder: Path) -> list[Path]:
    """Return the files with tests that are marked: others may need packages that a machine with a GPU has not."""
    return [file for file in sorted(folder.rglob("test_*.py")) if _MARK.search(file.read_text(encoding="utf-8"))]


def files_of(folder: str) -> list[str]:
    """Return the files of a folder with tests that need a GPU, from the root."""
    return [str(file.relative_to(_ROOT)) for file in _marked(_ROOT / folder)]


def command(files: list[str]) -> list[str]:
    """Return the command that runs these files' tests that need a GPU."""
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *files]


def run(deadline: Deadline) -> dict[str, Any]:
    """Run the tests marked ``gpu`` folder by folder, and return how each run ended, with the end of what it printed."""
    found: dict[str, Any] = {"folders": {}, "left_out": []}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for folder in FOLDERS:
        files = files_of(folder)
        if not files:
            continue
        if deadline.is_over():
            found["left_out"].append(folder)
            continue
        try:
            done = subprocess.run(  # noqa: S603  # pytest of this interpreter
                command(files),
                env=environment,
                cwd=_ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=deadline.left,
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
