"""A writer that was killed: the next one with the same text goes on where it ended, and writes the same bytes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4
from tests.support.checkpoints import is_same, visible
from tests.support.interpreter import run_interpreter

if TYPE_CHECKING:
    from typing_extensions import Self

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes are killed by a signal here")

CODE = """
import sys
from test_safetensors_resume import save
save(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


class Source(dict[str, q4.PackedWeight]):
    """Weights that count how often they are read, and kill the process at one of them."""

    read = 0
    deadly = 0

    @classmethod
    def make(cls, deadly: int) -> Self:
        """Return eight layers."""
        random = torch.Generator().manual_seed(7)
        found = cls((f"m.{index}", q4.quantize(torch.randn(16, 128, generator=random), "nf4")) for index in range(8))
        found.deadly = deadly
        return found

    def __getitem__(self, name: str) -> q4.PackedWeight:
        """Return a layer, or end the process."""
        self.read += 1
        if self.read == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)


def save(path: str | Path, dialect: str, deadly: int = 0, *, resume: str | None = "one") -> int:
    """Save the eight layers, and return how many of them were read."""
    source = Source.make(deadly)
    limit = None if str(path).endswith(".safetensors") else 4000
    dense = {f"n.{index}": torch.full((300,), float(index)) for index in range(3)}
    q4.save_checkpoint(path, source, dialect=dialect, dense=dense, max_shard_bytes=limit, resume=resume)
    return source.read


def killed(path: Path, dialect: str, deadly: int) -> None:
    """Save in a process that kills itself at one of the layers."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = run_interpreter(["-c", CODE, str(path), dialect, str(deadly)], env=variables)
    assert done.returncode == -signal.SIGKILL


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of a file, or of all files of a folder."""
    return {item.name: item.read_bytes() for item in ([path] if path.is_file() else path.iterdir())}


@pytest.mark.parametrize("dialect", ["simple-nf4", "bitsandbytes"])
@pytest.mark.parametrize("name", ["whole.safetensors", "folder"])
def test_a_killed_writer_is_continued(dialect: str, name: str, tmp_path: Path) -> None:
    """What was stored is not read again, and the files are those of a run that nobody stopped."""
    path = tmp_path / "killed" / name
    path.parent.mkdir()
    killed(path, dialect, 6)
    assert name not in visible(path.parent) or not list(path.glob("*.safetensors"))
    assert save(path, dialect) == 3
    reference = tmp_path / "whole" / name
    reference.parent.mkdir()
    save(reference, dialect, resume=None)
    assert contents(path) == contents(reference)
    assert {item.name for item in path.parent.iterdir()} == {name}
    assert all(is_same(weight, Source.make(0)[module]) for module, weight in q4.open(path).items())


@pytest.mark.parametrize("part", ["0.safetensors", "1.safetensors", "2.data", "journal.jsonl"])
def test_what_does_not_hold_is_written_again(part: str, tmp_path: Path) -> None:
    """A byte that changed, in any of the files, is found; the layers from there on are converted again."""
    path = tmp_path / "folder"
    killed(path, "simple-nf4", 8)
    (staging,) = path.glob(".q4core-*")
    damaged = bytearray((staging / part).read_bytes())
    damaged[-200 if part.startswith("journal") else -1] ^= 1
    (staging / part).write_bytes(damaged)
    assert 1 < save(path, "simple-nf4") <= 8
    save(tmp_path / "other", "simple-nf4", resume=None)
    assert contents(path) == contents(tmp_path / "other")


def test_another_text_starts_again(tmp_path: Path) -> None:
    """Files under another text are removed, never taken for these."""
    path = tmp_path / "folder"
    killed(path, "simple-nf4", 6)
    assert save(path, "simple-nf4", resume="two") == 8
    assert not list(path.glob(".q4core-*"))


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    """While one process writes, another one of the same text can't."""

    class Inner(Source):
        def __getitem__(self, name: str) -> q4.PackedWeight:
            with pytest.raises(q4.CheckpointError, match="another process writes the same"):
                save(tmp_path / "folder", "simple-nf4")
            return super().__getitem__(name)

    weights = Inner.make(0)
    q4.save_checkpoint(tmp_path / "folder", weights, dialect="simple-nf4", resume="one")
    assert set(q4.open(tmp_path / "folder")) == set(weights)
