"""Runs the ``q4`` command and Python for tests, and names the files that they give it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q4_cli.app import run
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

    import pytest

__all__ = ["AMBIGUOUS", "MODEL", "NF4", "ROOT", "answer", "process", "run_python", "say"]

ROOT = Path(__file__).parents[2]
NF4 = ROOT / "conformance/src/q4_conformance/golden/bitsandbytes/nf4-b64-double.safetensors"
MODEL = ROOT / "conformance/src/q4_conformance/golden/models/compressed-tensors-nvfp4"
AMBIGUOUS = ROOT / "conformance/src/q4_conformance/golden/modelopt/nvfp4-whole-tiles.safetensors"


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    """Run a command with ``--json`` and return the one document that it printed."""
    capsys.readouterr()
    assert run([*map(str, arguments), "--json"]) == status
    document = capsys.readouterr().out
    return json.loads(document)


def say(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """Run a command and return what it printed on stdout."""
    capsys.readouterr()
    assert run([*map(str, arguments)]) == status
    return capsys.readouterr().out


def _environment() -> dict[str, str]:
    """Return the variables of this process as a user has them: of ours, the instruction set and the cache."""
    kept = {"Q4_CPU_ISA", "Q4_CACHE"}
    return {name: text for name, text in os.environ.items() if not name.startswith("Q4_") or name in kept}


def process(*arguments: object, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    environment, given = _environment(), dict(variables or {})
    path = os.pathsep.join(filter(None, [str(ROOT), given.pop("PYTHONPATH", ""), environment.get("PYTHONPATH", "")]))
    variables = {**environment, "PYTHONPATH": path, **given}
    return run_interpreter(["-m", "q4_cli", *map(str, arguments)], timeout=scaled(180), env=variables)


def run_python(folder: Path, *arguments: str, **variables: str) -> str:
    """Run Python in a folder as a reader of a page would, with variables besides our own, and return what it prints."""
    done = run_interpreter(arguments, cwd=folder, env=_environment() | variables, timeout=scaled(120))
    assert done.returncode == 0, done.stderr
    return done.stdout
