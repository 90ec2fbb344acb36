"""What docs/networks.md shows is what happens."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "networks.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(4))
def test_snippet_runs(number: int, tmp_path: Path) -> None:
    """Each of the page's four programs runs as it stands."""
    assert len(SNIPPETS) == 4
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPETS[number], encoding="utf-8")
    runpy.run_path(str(file))
