"""``python -m benchmarks memory``: every way shares what it should, torn reads are found, and verdicts are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from matplotlib import image
from processes import CONTEXT  # whose server has imported what actors need

import q4core as q4
from benchmarks.candidate import WrongAnswerError
from benchmarks.memory import actors, command, ray_objects, ways
from benchmarks.memory.picture import draw

if TYPE_CHECKING:
    from pathlib import Path

assert CONTEXT.get_start_method() == ways.CONTEXT.get_start_method()
SCENE = actors.Scene("small", 1 << 12, 2)


class Tearing(ways.ThreadsLocked):
    """A tensor that nothing guards, and whose updates stop half-way."""

    def update(self) -> None:
        """Update the first half only."""
        self.tensor[: self.elements // 2].add_(1.0)


class Failing(ways.Shared):
    """A state whose writer fails."""

    def update(self) -> None:
        """Close it and go on."""
        self.state.close()
        super().update()


def test_a_read_must_be_whole_and_no_older() -> None:
    """A sample that mixes updates, or one from before the last read, is refused."""
    state = torch.full((1000,), 5.0)
    assert ways.check(state, 5.0) == 5.0
    with pytest.raises(WrongAnswerError, match=r"not before 6, got 5 … 5"):
        ways.check(state, 6.0)
    state[600:] = 4.0
    with pytest.raises(WrongAnswerError, match=r"got 4 … 5"):
        ways.check(state, 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ways.ways())
def test_every_way_updates_and_reads(name: str) -> None:
    """Each way gets updates to readers; ours copies once per update or never, as its mode says."""
    found = actors.sample(ways.ways()[name], SCENE, 0.3)
    assert found["updates_per_s"] > 0
    assert found["reads_per_s"] > 0
    assert found["longest_read_us"] >= found["read_us"] > 0
    copies = 1 if "VERSIONED" in name or "Queue" in name else 0
    assert found["bytes_per_update"] == pytest.approx(copies * SCENE.elements * 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "error"), [(Tearing, WrongAnswerError), (Failing, q4.LifecycleError)], ids=["torn", "failed"]
)
def test_wrong_actors_give_no_numbers(make: type[ways.Way], error: type[Exception]) -> None:
    """A torn read or an actor's error ends the measurement."""
    with pytest.raises(error):
        actors.sample(make, SCENE, 0.1)


def _result(reads: float, copied: float) -> dict[str, Any]:
    """Return a hand-made result in which all ways do alike, but for the reads and copies of the shared one."""
    values = {
        "updates_per_s": 10.0,
        "reads_per_s": 100.0,
        "read_us": 5.0,
        "longest_read_us": 50.0,
        "bytes_per_update": 0.0,
    }
    scenes = {}
    for scene in command.SCENES:
        rows = {name: dict(values) for name in (*ways.ways(), command.RAY)}
        rows[ways.SHARED] |= {"reads_per_s": reads, "bytes_per_update": copied * 4 * scene.elements}
        scenes[scene.name] = {
            name: {key: {"median": one, "p10": one * 0.9, "p90": one * 1.1} for key, one in row.items()}
            for name, row in rows.items()
        }
    return {"scenes": scenes, "state_bytes": {scene.name: 4 * scene.elements for scene in command.SCENES}}


@pytest.mark.parametrize(("reads", "copied", "missed"), [(500.0, 1.0, 0), (490.0, 1.0, 1), (500.0, 2.0, 3)])
def test_verdicts_follow_the_numbers(reads: float, copied: float, missed: int) -> None:
    """Five times the reads of a lock in the small scene, and one copy in each, are just enough."""
    judged = command.judge(_result(reads, copied))
    assert len(judged) == 4 * len(command.SCENES) + 1
    assert [one.is_met for one in judged].count(False) == missed


def test_the_picture_has_a_row_for_each_scene(tmp_path: Path) -> None:
    """The picture opens, and grows with the scenes."""
    result = _result(500.0, 1.0)
    whole = image.imread(draw(result, tmp_path / "whole.png"))
    first = dict([next(iter(result["scenes"].items()))])
    part = image.imread(draw(result | {"scenes": first}, tmp_path / "part.png"))
    assert whole.shape[0] > 2.5 * part.shape[0]
    green = torch.tensor([0x0B, 0x6E, 0x4F])
    assert int(((torch.tensor(part[..., :3]) * 255 - green).abs() < 1).all(-1).sum()) > 1000


def test_ray_is_named_whether_it_is_installed_or_not() -> None:
    """Ray's entry has its version, or the words that it is not installed."""
    facts = ray_objects.facts()
    assert facts["version"] if facts["installed"] else facts["why"]
