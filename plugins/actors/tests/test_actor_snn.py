"""``examples/actor_snn.py``: any number of actors computes the same, also when some are late or killed."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from matplotlib import image
from pretended_driver import GB10, accept_pretended, pretend

import q4core as q4
from q4_actors import ActorDeadError
from q4_nn import ste_weight
from tests.repository.test_examples import ROOT, run_example

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

STEPS = 12
RED = (0xCC, 0x00, 0x00)
BLUE = (0x34, 0x65, 0xA4)

pytestmark = pytest.mark.slow


@pytest.fixture
def snn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the example as a module, which the actors' processes find too."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("actor_snn")


@pytest.fixture
def masters(snn: Any) -> dict[str, torch.Tensor]:
    """Give random synapses, in no order that the populations share, which make many neurons fire."""
    generator = torch.Generator().manual_seed(3)
    width = snn.SIZE * len(snn.HIDDEN)
    shapes = {"hidden": (width, snn.SIZE + width), "out": (snn.DIGITS, width)}
    return {name: torch.randn(shape, generator=generator).mul_(0.15) for name, shape in shapes.items()}


def _images(snn: Any, count: int = 16) -> torch.Tensor:
    images: torch.Tensor = snn.digits()[2][:count]
    return images


def _dense(snn: Any, masters: dict[str, torch.Tensor], images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the spikes so far of each population, as one loop over dense float64 matrices computes them."""
    weights = {name: ste_weight(master, snn.FORMAT).double() for name, master in masters.items()}
    width = snn.SIZE * len(snn.HIDDEN)
    membrane, spikes, count = (torch.zeros(len(images), width, dtype=torch.float64) for _ in range(3))
    out, told = (torch.zeros(len(images), snn.DIGITS, dtype=torch.float64) for _ in range(2))
    for step in range(1, STEPS + 1):
        out, fired = snn.integrate(out, spikes @ weights["out"].T)
        seen = torch.cat([snn.input_spikes(images, -step).double(), spikes], 1)
        membrane, spikes = snn.integrate(membrane, seen @ weights["hidden"].T)
        count, told = count + spikes, told + fired
    return {**dict(zip(snn.HIDDEN, count.split(snn.SIZE, 1), strict=True)), "out": told}


def test_actors_compute_what_one_loop_does(snn: Any, masters: dict[str, torch.Tensor]) -> None:
    """Each neuron has fired as often as in a loop over dense matrices, but for one in 500, by rounding."""
    images = _images(snn)
    outcome = snn.simulate(masters, images, snn.Plan(steps=STEPS))
    expected = _dense(snn, masters, images)
    for name, state in outcome.states.items():
        assert expected[name].sum() > 50
        assert (state[snn.COUNT].double() != expected[name]).double().mean() < 1 / 500


MANNERS = ((1, 0.0), (2, 0.0), (4, 0.0), (2, 0.02), (4, 0.02))
"""Numbers of actors, and for how long each sleeps at most."""


@pytest.mark.parametrize(
    ("runtime", "manners"),
    [
        ("threads", MANNERS),
        ("processes", ((2, 0.02),)),
        pytest.param("processes", MANNERS, marks=pytest.mark.soak),
    ],
    ids=["threads", "processes", "processes-all"],
)
def test_the_result_is_the_same_bit_for_bit(
    snn: Any, masters: dict[str, torch.Tensor], runtime: str, manners: tuple[tuple[int, float], ...]
) -> None:
    """One, two and four actors, steady and with random sleeps, leave the same bits; another pixel leaves others."""
    images = _images(snn)
    wanted = snn.simulate(masters, images, snn.Plan(steps=STEPS, actors=1))
    for actors, jitter in manners:
        got = snn.simulate(masters, images, snn.Plan(STEPS, actors, runtime, 0, jitter))
        assert got.digest == wanted.digest, (actors, jitter)
    changed = images.clone()
    changed[-1, 20] = 1.0 - changed[-1, 20]
    assert snn.simulate(masters, changed, snn.Plan(steps=STEPS)).digest != wanted.digest


def test_killed_actors_leave_no_trace(snn: Any, masters: dict[str, torch.Tensor]) -> None:
    """Actors that are killed in mid-step are replaced, and the result is that of those who lived."""
    images = _images(snn)
    wanted = snn.simulate(masters, images, snn.Plan(steps=STEPS, actors=1))
    got = snn.simulate(masters, images, snn.Plan(STEPS, actors=3, runtime="processes", kills=5, jitter=0.01))
    assert (got.digest, got.killed) == (wanted.digest, 5)


def test_every_kill_is_one_that_happened(snn: Any, masters: dict[str, torch.Tensor]) -> None:
    """As many as the steps allow are killed, one actor alone each time, and the result is the same."""
    images = _images(snn, 4)
    wanted = snn.simulate(masters, images, snn.Plan(steps=3, actors=1))
    got = snn.simulate(masters, images, snn.Plan(3, actors=1, runtime="processes", kills=2))
    assert (got.digest, got.killed, wanted.killed) == (wanted.digest, 2, 0)


def test_each_step_copies_each_state_once(snn: Any, masters: dict[str, torch.Tensor]) -> None:
    """The bytes reported as copied are one update of the five populations and the pixels, and no read."""
    sizes = 4 * (4 * snn.SIZE) + 4 * snn.DIGITS + snn.SIZE
    for runtime in ("threads", "processes"):
        outcome = snn.simulate(masters, _images(snn), snn.Plan(STEPS, actors=2, runtime=runtime))
        assert outcome.step_bytes == 16 * sizes * 4


def test_states_in_unified_memory(snn: Any, masters: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """``--device cuda --unified-memory require_unified`` over a pretended driver: no update copies, the bits agree."""
    accept_pretended(monkeypatch)
    facts = {"is_available": True, "device_count": 1, "current_device": 0, "is_current_stream_capturing": False}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    provider = pretend(GB10).provider
    monkeypatch.setattr(q4.default_registry(), "memory_providers", lambda: [provider])
    images = _images(snn)
    wanted = snn.simulate(masters, images, snn.Plan(steps=STEPS, actors=1))
    got = snn.simulate(masters, images, snn.Plan(STEPS, 3, device="cuda", unified_memory="require_unified"))
    assert got.digest == wanted.digest
    assert got.step_bytes == 0 < wanted.step_bytes


def test_an_actor_that_fails_ends_the_run(snn: Any, masters: dict[str, torch.Tensor]) -> None:
    """An actor that fails for good ends the run, which says which one."""
    broken = masters | {"out": masters["out"][:, :64]}
    with pytest.raises(ActorDeadError, match=r"actor 'Worker-\d' is dead"):
        snn.simulate(broken, _images(snn), snn.Plan(STEPS, actors=5, runtime="processes"))


def test_the_command_classifies_digits_and_draws(tmp_path: Path) -> None:
    """A short training classifies most unseen digits; rates and bytes are reported; a picture is drawn."""
    arguments = ("--epochs", 5, "--actors", 2, "--steps", 30, "--picture", "snn.png")
    done = run_example("actor_snn.py", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["snn.png"]
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)% with nf4 synapses", done.stdout)
    assert float(accuracy) > 70.0
    steps, spikes = re.findall(r"([\d,]+) steps/s of 360 images, ([\d,]+) spikes/s", done.stdout)[0]
    assert int(spikes.replace(",", "")) > int(steps.replace(",", "")) > 0
    assert "1,624,320 bytes copied per step" in done.stdout
    pixels: np.ndarray[Any, Any] = image.imread(tmp_path / "snn.png", format="png")
    half = int(pixels.shape[1] * 0.55)
    for part in (pixels[:, :half], pixels[:, half:]):
        for colour in (RED, BLUE):
            assert (abs(part[..., :3] * 255 - colour) < 1).all(axis=-1).sum() > 50


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--kills", 1), "--kills needs --runtime processes or ray"),
        (("--runtime", "ray", "--device", "cuda"), "--device cuda needs threads"),
        (("--steps", 1), "--steps must be at least 2"),
        (("--runtime", "ray", "--steps", 3, "--kills", 3), "--kills must be 0 … 2"),
        (("--runtime", "processes", "--kills", -3), "--kills must be 0 … 39"),
        (("--epochs", -1), "--epochs must be at least 1"),
        (("--picture", "snn.jpg"), "--picture must be a file in a folder that is there, and end in .png"),
        (("--picture", "nowhere/snn.png"), "--picture must be a file in a folder that is there"),
        (("--jitter", "nan"), "--jitter must be seconds, 0 or more"),
    ],
)
def test_the_command_refuses(
    snn: Any,
    arguments: tuple[object, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options that mean nothing are refused before anything is trained or written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["actor_snn.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        snn.main()
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
