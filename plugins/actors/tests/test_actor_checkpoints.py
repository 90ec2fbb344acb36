"""Checkpoints of actors that were damaged, killed while they were written, or written by another program."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4
from q4_actors import ActorSystem
from tests.support.interpreter import run_interpreter

if TYPE_CHECKING:
    from pathlib import Path


def written(path: Path, source: str | None = None) -> Path:
    """Write a checkpoint of two tensors."""
    with ActorSystem("threads") as system:
        for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
            made = system.mutable(torch.zeros(3, 2, dtype=dtype), name=name, source=source)
            made.replace(torch.ones(3, 2, dtype=dtype))
        system.checkpoint(path)
    return path


def test_flipped_bits(tmp_path: Path) -> None:
    """With any bit flipped, a checkpoint is refused, or holds what was written."""
    path = written(tmp_path / "c.pt")
    good, bad = path.read_bytes(), tmp_path / "bad.pt"
    refused = 0
    for place in range(0, len(good), 5):
        flipped = good[place] ^ (1 << place % 8)
        bad.write_bytes(good[:place] + bytes([flipped]) + good[place + 1 :])
        try:
            system = ActorSystem("threads", resume=bad)
        except q4.CheckpointError:
            refused += 1
            continue
        with system:
            for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
                made = system.mutable(torch.zeros(3, 2, dtype=dtype), name=name)
                assert (made.version, made.snapshot().tensor.tolist()) == (1, [[1.0, 1.0]] * 3)
    assert refused > 0


def test_every_bit_of_the_content(tmp_path: Path) -> None:
    """A value, a version or a name that differs from what was written is an error before a tensor is made."""
    path = written(tmp_path / "c.pt")
    good = torch.load(path, weights_only=True)
    for name in good["tensors"]:
        for key, value in (("version", 3), ("mode", "in_place"), ("source", "x"), ("tensor", torch.full((3, 2), 1.5))):
            changed = {**good["tensors"], name: {**good["tensors"][name], key: value}}
            torch.save({**good, "tensors": changed}, path)
            with pytest.raises(q4.CheckpointError, match="its digest differs"):
                ActorSystem("threads", resume=path)
    torch.save({**good, "tensors": {"c": good["tensors"]["a"], "b": good["tensors"]["b"]}}, path)
    with pytest.raises(q4.CheckpointError, match="its digest differs"):
        ActorSystem("threads", resume=path)


def test_source(tmp_path: Path) -> None:
    """A tensor that something else computes is refused; who names no source takes any."""
    path = written(tmp_path / "c.pt", source="1f")
    with ActorSystem("threads", resume=path) as system:
        with pytest.raises(q4.InputError, match="'a': source must be the checkpoint's 1f, got '2e'"):
            system.mutable(torch.zeros(3, 2), name="a", source="2e")
        assert system.mutable(torch.zeros(3, 2), name="a", source="1f").version == 1
        system.mutable(torch.zeros(3, 2, dtype=torch.bfloat16), name="b")


KILLED = """
import os, signal, sys, torch
from q4_actors import ActorSystem
with ActorSystem("threads") as system:
    system.mutable(torch.zeros(3), name="a")
    torch.save = lambda what, file: (file.write(b"half"), file.flush(), os.kill(os.getpid(), signal.SIGKILL))
    system.checkpoint(sys.argv[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no SIGKILL")
def test_killed_while_it_is_written(tmp_path: Path) -> None:
    """What a killed checkpoint left is removed by the next one of that name; the old one and others' files stay."""
    path = written(tmp_path / "c.pt")
    before = path.read_bytes()
    (tmp_path / ".c.pt.bak").touch()
    (tmp_path / ".d.pt.x.q4tmp").touch()
    done = run_interpreter(["-c", KILLED, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 4
    written(path)
    assert {item.name for item in tmp_path.iterdir()} == {"c.pt", ".c.pt.bak", ".d.pt.x.q4tmp"}
