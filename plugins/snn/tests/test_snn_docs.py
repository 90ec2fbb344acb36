"""The programs of docs/spiking.md run as they stand, and the examples do what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import image
from matplotlib import pyplot as plt

from tests.repository.test_examples import run_example

ROOT = Path(__file__).parents[3]


def test_programs_of_the_page(tmp_path: Path) -> None:
    """The second goes on from the first, and gives what the network gives; the third, alone, changes synapses."""
    page = (ROOT / "docs" / "spiking.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(programs) == 3
    file = tmp_path / "program.py"
    file.write_text("\n".join(programs[:2]), encoding="utf-8")
    defined = runpy.run_path(str(file))
    network, x = defined["network"], defined["x"]
    with torch.no_grad():
        assert torch.equal(defined["again"]["out"], network(x)[0]["out"])
    file.write_text(programs[2], encoding="utf-8")
    assert runpy.run_path(str(file))["changed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("snn_digits.py", marks=pytest.mark.soak), "snn_events.py"])
def test_classifying_examples(name: str, tmp_path: Path) -> None:
    """One short training classifies better than chance; steps are shown as they are done, and a picture is drawn."""
    done = run_example(name, "--epochs", 2, "--seeds", 1, "--hidden", 32, "--picture", "s.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shares = re.findall(r"(float|nf4) synapses: ([\d.]+)% of the test samples right", done.stdout)
    assert [kind for kind, _ in shares] == ["float", "nf4"]
    assert min(float(share) for _, share in shares) > 20.0
    assert len(re.findall(r"^ *\d+ [ |]{32,64} \d$", done.stdout, re.MULTILINE)) in {16, 18}
    assert image.imread(tmp_path / "s.png", format="png")[..., :3].reshape(-1, 3).std(0).max() > 0.05


@pytest.mark.slow
def test_plasticity_example(tmp_path: Path) -> None:
    """Synapses of inputs that fire together stay above the others."""
    done = run_example("snn_stdp.py", "--seconds", 2, "--picture", "s.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    pairs = re.findall(r"([+-][\d.]+) together, ([+-][\d.]+) apart", done.stdout)
    assert len(pairs) == 4
    assert float(pairs[-1][0]) - float(pairs[-1][1]) > 0.1
    assert image.imread(tmp_path / "s.png", format="png")[..., :3].reshape(-1, 3).std(0).max() > 0.05


def test_programs_of_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program of the page runs by itself, and gives what the page says that it gives."""
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    page = (ROOT / "docs" / "spiking-experiments.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(programs) == 3
    found = []
    for program in programs:
        file = tmp_path / "program.py"
        file.write_text(program, encoding="utf-8")
        found.append(runpy.run_path(str(file)))
    plt.close("all")
    runs, learning, measures = found
    assert runs["state"].clock == 4000
    assert len(runs["spikes"].data) > 1000
    assert np.load(tmp_path / "membranes.npy").shape == (400, 1, 2)
    assert image.imread(tmp_path / "raster.png", format="png")[..., :3].reshape(-1, 3).std(0).max() > 0.05
    assert not torch.equal(learning["weight"].qdata, learning["learning"].weight_in().qdata)
    assert 0.0 < measures["found"]["activation_sparsity"] <= 1.0
