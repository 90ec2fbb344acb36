"""What ``docs/memory.md`` and the README of um-managed show is what happens."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import scaled

PAGES = ("docs/memory.md", "plugins/um-managed/README.md")
SNIPPETS = [
    snippet
    for page in PAGES
    for snippet in re.findall(
        r"^```python\n(.*?)^```",
        (Path(__file__).parents[2] / page).read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
]


def test_there_are_snippets() -> None:
    """The test below has something to run: threads, processes, policies and sides, and a layer."""
    assert len(SNIPPETS) >= 5


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: re.findall(r"\w+\.?\w*\(", snippet)[0].rstrip("("))
def test_snippet_runs(snippet: str, tmp_path: Path) -> None:
    """Each runs unchanged, and without any device; from a file of its own where processes import it again."""
    file = tmp_path / "snippet.py"
    file.write_text(snippet, encoding="utf-8")
    if "multiprocessing" not in snippet:
        runpy.run_path(str(file))
        return
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stderr
