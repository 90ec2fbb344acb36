"""The golden files are what the packages make today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peer


def test_packages_make_the_same_golden_files() -> None:
    """A fresh run of the makers gives every golden file byte for byte."""
    script = Path(__file__).parents[2] / "conformance" / "golden" / "make.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
