"""What the program of UC-04 says of Ray, where Ray is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands import run_python

pytestmark = pytest.mark.peer
SCRIPT = Path(__file__).parents[2] / "examples" / "use_cases" / "uc_04_use_unified_memory.py"


def test_actors_tensors_on_ray_fall_back_with_a_reason(tmp_path: Path) -> None:
    """The statement about Ray is judged and holds; the reason is printed under it."""
    printed = run_python(tmp_path, "-W", "ignore", str(SCRIPT))
    assert re.search(r"^✓ Actors' tensors on Ray do so, too\.\n    ray: fallback: \S", printed, re.MULTILINE)
