"""Each page whose blocks continue one another runs from its first line to its last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import q4core as q4
from q4_conformance import Outcome, layer_cases, run_case
from q4_conformance.subjects.layer_type import LayerSubject
from tests.support.pages import ROOT
from tests.support.snippets import blocks, run_page

PAGES = [
    "first-steps",
    "proof",
    "extension",
    "new-architecture",
    "new-neuron-model",
    "tutorials/run-a-checkpoint",
    "tutorials/build-train-pack",
    "tutorials/actors-and-spikes",
    "from/bitsandbytes",
    "from/snntorch",
    "from/nest",
]
ELSEWHERE = {
    "tutorials/huggingface-and-lora": "tests/peers/test_doc_pages_peers.py",
    "from/llama-cpp": "tests/peers/test_llama_cpp.py",
    "networks": "plugins/lm/tests/test_lm_docs.py",
    "training": "plugins/lm/tests/test_lm_docs.py",
    "models-from-files": "plugins/lm/tests/test_lm_docs.py",
    "add-a-layer-type": "plugins/lm/tests/test_lm_docs.py",
    "spiking": "plugins/snn/tests/test_snn_docs.py",
    "spiking-experiments": "plugins/snn/tests/test_snn_docs.py",
    "actors": "plugins/actors/tests/test_actors.py",
    "memory": "tests/repository/test_memory_docs.py",
    "backend-api": "tests/backend/test_backend.py",
    "huggingface": "plugins/transformers/tests/peers/test_huggingface.py",
    "write-a-backend/index": "tests/repository/test_write_a_backend.py",
    "write-a-backend/kernel": "tests/repository/test_write_a_backend.py",
    "write-a-backend/certify": "tests/repository/test_write_a_backend.py",
    "write-a-backend/dialect": "tests/repository/test_write_a_backend.py",
    "write-a-backend/memory": "tests/repository/test_write_a_backend.py",
}
_CHINESE = [path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in ROOT.glob("docs/zh/*/*.md")]
ELSEWHERE |= dict.fromkeys(_CHINESE, "tests/repository/test_chinese.py")  # programs of the English page, which are run
"""Page with programs → the tests that run them."""


def read(name: str) -> str:
    """Return a page of docs."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_page_runs(name: str, tmp_path: Path) -> None:
    """Programs and commands of the page run in order, unchanged, in an empty folder."""
    assert blocks(read(name))
    run_page(read(name), tmp_path)


def test_every_page_with_programs_is_run() -> None:
    """A page with a program is in the list above, or is named with the tests that run it."""
    pages = {
        str(path.relative_to(ROOT / "docs").with_suffix(""))
        for path in (ROOT / "docs").rglob("*.md")
        if re.search(r"^```python\n", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert pages == {*PAGES, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        place = ROOT / test
        files = [place] if place.is_file() else [*place.rglob("test_*.py")]
        names = {Path(name).stem, Path(name).parts[0]}  # the tests of a guide read its folder
        texts = [file.read_text(encoding="utf-8") for file in files]
        assert any(word in text for word in names for text in texts), f"{test} does not run {name}"


def test_a_block_that_fails_and_a_command_that_prints_something_else_are_found(tmp_path: Path) -> None:
    """A page's errors are raised; so is a line that the page shows and the command does not print."""
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```\n", tmp_path)
    with pytest.raises(AssertionError, match="does not print 'two'"):
        run_page("```console\n$ echo one\none\ntwo\n```\n", tmp_path)
    with pytest.raises(AssertionError, match="exit 3"):
        run_page("```console\n$ exit 3\n```\n", tmp_path)


def test_pairs_have_theirs_first(tmp_path: Path) -> None:
    """Of a pair the first block is the other library's, and is not run with ours."""
    page = "<!-- container: pair -->\n```python\nx = 'theirs'\n```\n\n```python\nx = 'ours'\n```\n<!-- /container -->\n"
    assert run_page(page, tmp_path)["x"] == "ours"
    assert run_page(page, tmp_path, theirs=True)["x"] == "theirs"


def test_nest_and_we_fire_at_the_same_times(tmp_path: Path) -> None:
    """The times that NEST 3.10 printed are those of our neuron, and those that the closed form gives."""
    page = read("from/nest")
    printed = [float(word) for word in re.findall(r"^```text\n(.*)\n```", page, re.MULTILINE)[0].split()]
    assert run_page(page, tmp_path)["times"] == printed
    rise = 10.0 * torch.log(torch.tensor(20.0 / 5.0))  # ms from rest to the threshold: 20 mV aimed at, 15 mV above rest
    steps = int(torch.ceil(rise / 0.1))
    assert printed == [round((steps + number * (steps + 20)) * 0.1, 1) for number in range(6)]


def test_the_neuron_is_certified_as_described(tmp_path: Path) -> None:
    """The layer type of docs/new-neuron-model.md passes every case of its profile, and its program ran natively."""
    defined = run_page(read("new-neuron-model"), tmp_path)
    (kind,) = defined["q4_layers"]()
    results = [run_case(case, LayerSubject(kind)) for case in layer_cases()]
    assert {result.outcome for result in results} == {Outcome.PASS}, results
    assert "cpu-native" in str(defined["network"].record) or not q4.default_registry().backends()
