"""What the pages about networks show is what happens."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from q4_conformance import Outcome, layer_cases, run_case
from q4_conformance.subjects.layer_type import LayerSubject
from q4_programs import make_program

DOCS = Path(__file__).parents[3] / "docs"


def programs(page: str) -> list[str]:
    """Return the programs that a page shows."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(program: str, folder: Path) -> dict[str, Any]:
    """Run a program unchanged, and return what it defines."""
    file = folder / "program.py"
    file.write_text(program, encoding="utf-8")
    return runpy.run_path(str(file))


@pytest.mark.parametrize("number", range(4))
def test_programs_run(number: int, tmp_path: Path) -> None:
    """Each program of docs/networks.md runs unchanged."""
    assert len(programs("networks.md")) == 4
    run(programs("networks.md")[number], tmp_path)


def test_the_functions_of_training_run(tmp_path: Path) -> None:
    """The program of docs/training.md runs unchanged, and its dense weights are those of the packed weight."""
    (program,) = programs("training.md")
    defined = run(program, tmp_path)
    assert defined["y"].shape == (8, 128)
    assert torch.equal(defined["w"], defined["d"])


def test_a_model_from_a_file(write_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of docs/models-from-files.md runs on a file of that name."""
    (program,) = programs("models-from-files.md")
    write_llama(context=2600).rename(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.chdir(tmp_path)
    assert len(run(program, tmp_path)["rows"]) == 2


def test_the_layer_type_is_certified_as_described(tmp_path: Path) -> None:
    """The layer type of docs/add-a-layer-type.md passes every case of its profile."""
    defined = run("\n".join(programs("add-a-layer-type.md")), tmp_path)
    (kind,) = defined["q4_layers"]()
    results = [run_case(case, LayerSubject(kind)) for case in layer_cases()]
    assert {result.outcome for result in results} == {Outcome.PASS}, results
    model, x = defined["EmittedScale"](4, 2.0).eval(), torch.randn(3, 4)
    program = make_program(model, x)
    with torch.no_grad():
        assert torch.equal(program(x), 2 * x)
    assert program.record.calls == 1
    assert defined["by_type"].emit is defined["emit_scale"]
