"""Bars with the time left, on the terminals of commands that load and compute, and what help says without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import q4core as q4
from q4_lm import LanguageModel, measure_perplexity
from q4_lm.commands import declared
from q4_lm.models.load import loading_watched
from q4core.plugin_api import FLOATS
from tests.support.limits import scaled

if TYPE_CHECKING:
    from pathlib import Path


def on_terminal(*words: object, **variables: str) -> str:
    """Run the command with a terminal for stderr, and return what is shown there."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **variables}
    command = [sys.executable, "-m", "q4_cli", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as child:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # Linux's end of a terminal
                break
            if not piece:
                break
            shown += piece
        child.wait(timeout=scaled(60))
    os.close(ours)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())  # without colours and movements
    assert child.returncode == 0, text
    return text


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="terminals of POSIX")
def test_commands_that_take_long_show_a_bar(tiny_llama: Path, tmp_path: Path) -> None:
    """Loading and reading have bars that end at 100 %, with the time left; stdout has none of it."""
    text = tmp_path / "text.txt"
    text.write_text("the thing and the other thing " * 40)
    shown = on_terminal("perplexity", tiny_llama, text, "--window", 8, Q4_CACHE="off")
    for label in ("loading", "reading"):
        assert re.search(rf"{label} \S+ 100% 0:00:00", shown), shown
    cache = str(tmp_path / "cache")
    assert re.search(r"loading \S+ 100%", on_terminal("prepare", tiny_llama, Q4_CACHE=cache))


def test_loading_and_perplexity_tell_how_far_they_are(tiny_llama: Path) -> None:
    """Each step is told once, in order, up to all; outside the block nothing is."""
    steps: list[tuple[int, int]] = []
    config = q4.SessionConfig(device="cpu", backend="dequant-fallback")
    with loading_watched(lambda done, total: steps.append((done, total))):
        model = LanguageModel.open(tiny_llama, config, cache="off")
    with model:
        blocks = len(model.decoder.layers)
        assert steps == [(done, blocks + 1) for done in range(1, blocks + 2)]
        LanguageModel.open(tiny_llama, config, cache="off").close()
        assert len(steps) == blocks + 1
        pieces: list[tuple[int, int]] = []
        text = "the thing and the other thing " * 5
        measure_perplexity(model, text, window=8, watch=lambda done, total: pieces.append((done, total)))
    assert pieces == [(done, pieces[-1][1]) for done in range(1, pieces[-1][1] + 1)]
    assert len(pieces) > 1


def test_what_help_says_without_the_core_is_the_cores() -> None:
    """The choices that help and completion show are those that the library takes, in its order."""
    assert tuple(item.value for item in q4.ComputePath) == declared.COMPUTE_PATHS
    assert tuple(item.value for item in q4.ActivationPrecision) == declared.PRECISIONS
    assert set(declared.DTYPES) == {str(item).removeprefix("torch.") for item in FLOATS}
