"""What docs/networks.md shows is what happens."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from q4_conformance import Outcome, layer_cases, run_case
from q4_conformance.subjects.layer_type import LayerSubject

PAGE = Path(__file__).parents[3] / "docs" / "networks.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(4))
def test_snippet_runs(number: int, tmp_path: Path) -> None:
    """Each of the page's four programs runs as it stands."""
    assert len(SNIPPETS) == 4
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPETS[number], encoding="utf-8")
    runpy.run_path(str(file))


def test_the_layer_type_is_certified_as_told(tmp_path: Path) -> None:
    """The page's layer type passes every case of its profile."""
    file = tmp_path / "my_layers.py"
    file.write_text(SNIPPETS[2], encoding="utf-8")
    (kind,) = runpy.run_path(str(file))["q4_layers"]()
    results = [run_case(case, LayerSubject(kind)) for case in layer_cases()]
    assert {result.outcome for result in results} == {Outcome.PASS}, results
