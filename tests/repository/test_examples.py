"""The examples do what they say, in processes of their own."""

from __future__ import annotations

import ast
import math
import os
import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from matplotlib import image

from q4_snn import PoissonInput
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

if TYPE_CHECKING:
    import subprocess

    import numpy as np

ROOT = Path(__file__).parents[2]
BLUE, GREEN = (0x34, 0x65, 0xA4), (0x4E, 0x9A, 0x06)

pytestmark = pytest.mark.slow


@attrs.frozen
class TrainingRun:
    """What three epochs of ``examples/train_ste.py`` left behind."""

    text: str
    picture: Path

    def number(self, pattern: str) -> float:
        """Return the one number that the text has at the pattern's group."""
        (found,) = re.findall(pattern, self.text)
        return float(found)


def run_example(name: str, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example in a folder, as a user would."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    words = ["-W", "error", str(ROOT / "examples" / name), *map(str, arguments)]
    return run_interpreter(words, timeout=scaled(300), cwd=folder, env={**os.environ, "PYTHONPATH": path})


def test_each_example_names_what_it_needs() -> None:
    """Every example says which extra it needs, and names what it imports beyond that; the extra has nothing else."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^examples = \[(.*?)^\]$", text, flags=re.MULTILINE | re.DOTALL)
    extra = set(re.findall(r'"([\w-]+)', listed))
    own = {path.stem for path in (ROOT / "examples").glob("*.py")} | {
        "attrs",
        "torch",
        "q4core",
    }  # attrs is a part of q4core
    found = set()
    for path in (ROOT / "examples").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(source)) or ""
        assert 'pip install "q4core[examples]"' in text, path.name
        libraries = set(re.findall(r"^(?:from|import) (\w+)", source, flags=re.MULTILINE))
        needed = {name.replace("q4_", "q4-") for name in libraries - own - set(sys.stdlib_module_names)}
        needed = {name.replace("sklearn", "scikit-learn") for name in needed}
        assert {name for name in needed - extra if name.removeprefix("q4-") not in text} == set(), path.name
        found |= needed
    assert extra <= found


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Train for three epochs."""
    folder = tmp_path_factory.mktemp("training")
    done = run_example("train_ste.py", "--epochs", 3, "--picture", "curves.png", folder=folder)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["curves.png"]
    return TrainingRun(done.stdout, folder / "curves.png")


def test_training_learns(training: TrainingRun) -> None:
    """After three epochs the loss has fallen, and most digits of the test set are right; by chance, a tenth is."""
    first, last = re.findall(r"loss ([\d.]+) → ([\d.]+)", training.text)[0]
    assert float(last) < float(first)
    assert training.number(r"test accuracy ([\d.]+)% with nvfp4 weights") > 50.0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the example counts memory on Linux only")
def test_training_leaves_memory_where_it_was(training: TrainingRun) -> None:
    """The third epoch leaves the process as large as the second; the cache that evaluation filled is given back.

    An epoch has 23 steps. If each left its float32 quantised weights behind (37,888 bytes), the process would have
    grown by 0.8 MB; half of that is allowed for the allocator.
    """
    assert training.number(r"memory since the second epoch: ([+-][\d.]+) MB") <= 0.4
    assert "the eval cache held 37,888 bytes, now given back" in training.text


def test_training_draws_both_curves(training: TrainingRun) -> None:
    """The picture opens in a PNG decoder, and has the loss in its left half and the accuracy in its right half."""
    pixels: np.ndarray = image.imread(training.picture, format="png")
    height, width, _ = pixels.shape
    assert height > 200
    assert width > 2 * height

    def count(part: np.ndarray, colour: tuple[int, int, int]) -> int:
        return int((abs(part[..., :3] * 255 - colour) < 1).all(axis=-1).sum())

    left, right = pixels[:, : width // 2], pixels[:, width // 2 :]
    assert count(left, BLUE) > 100
    assert count(right, GREEN) > 100
    assert count(left, GREEN) == count(right, BLUE) == 0


def test_training_refuses_no_epochs(tmp_path: Path) -> None:
    """Zero epochs leave nothing to draw: the example says so and writes nothing."""
    done = run_example("train_ste.py", "--epochs", 0, folder=tmp_path)
    assert done.returncode == 2
    assert "--epochs must be at least 1" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_small_microcircuit_fires(tmp_path: Path) -> None:
    """At a hundredth of the size every population fires, slowly, inhibitory ones of layers 2/3, 4 and 6 faster."""
    done = run_example("microcircuit.py", "--scale", 0.01, "--seconds", 1, "--picture", "raster.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rates = {name: float(rate) for name, rate in re.findall(r"^(L\S+) +([\d.]+) spikes/s", done.stdout, re.MULTILINE)}
    assert len(rates) == 8
    assert all(0 < rate < 20 for rate in rates.values())
    assert all(rates[f"{layer}I"] > rates[f"{layer}E"] for layer in ("L2/3", "L4", "L6"))
    assert re.search(r"767 neurons, \d+ synapses of 2\.\d+ bytes", done.stdout)
    assert image.imread(tmp_path / "raster.png").shape == (600, 1440, 4)


def test_the_microcircuit_is_nests_equations() -> None:
    """A plain loop of them in float64, with the same random numbers, fires the same spikes in the same steps."""
    given = runpy.run_path(str(ROOT / "examples" / "microcircuit.py"))
    model, steps = given["scaled"](0.02), 2000
    network = given["build"](model, 1)
    found = given["simulate"](model, network, steps * 1e-4, 1)
    assert network.record.backend == "cpu-native"
    of_each, count = torch.tensor(model.sizes), sum(model.sizes)
    outside = PoissonInput(count, model.outside.float().repeat_interleave(of_each), model.outside_weight, seed=1)
    arriving = outside.draw(0, steps)[:, 0].double()
    synapses = network.projections["cells->cells"]
    dt, tau, tau_syn, capacity = 0.1, 10.0, 0.5, 250.0
    leak, decay = math.exp(-dt / tau), math.exp(-dt / tau_syn)
    charge = tau * tau_syn / (capacity * (tau_syn - tau)) * (decay - leak)
    drive = tau / capacity * (1 - leak) * model.current.double().repeat_interleave(of_each)
    voltage = torch.empty(1, count).normal_(7.0, 10.0, generator=torch.Generator().manual_seed(1))[0].double()
    flow, free_at = torch.zeros(count).double(), torch.zeros(count, dtype=torch.int64)
    ring = torch.zeros(300, count).double()
    events = []
    for step in range(steps):
        flow = flow * decay + ring[step % 300] + arriving[step]
        ring[step % 300] = 0
        voltage = torch.where(free_at <= step, leak * voltage + charge * flow + drive, 0.0)
        fired = (voltage >= 15.0).nonzero()[:, 0]
        voltage[fired], free_at[fired] = 0.0, step + 21
        events += [(step, neuron) for neuron in fired.tolist()]
        target, weight, delay = synapses.synapses_of(fired)
        ring.view(-1).index_add_(0, (step + delay) % 300 * count + target, weight.double())
    assert len(events) > 800
    assert found.tolist() == [[*event] for event in events]
