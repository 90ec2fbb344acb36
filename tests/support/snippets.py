"""Pages as programs: their blocks run in order, unchanged, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs

from tests.support.limits import scaled

__all__ = ["Block", "blocks", "run_page"]

_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PAIR = re.compile(r"^<!-- container: pair -->\n(.*?)^<!-- /container -->$", re.DOTALL | re.MULTILINE)

_FILE = re.compile(r"# (\w+\.py)\n")
"""The first line of a block that is a part of a file."""


@attrs.frozen
class Block:
    """A block of a page.

    Args:
        kind: ``python``, or ``console`` for commands behind ``$`` and parts of what they print.
        text: Its lines.
        is_theirs: Whether it is the first of a pair: the call of another library.
    """

    kind: str
    text: str
    is_theirs: bool = False


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    theirs = set()
    for pair in _PAIR.finditer(page):
        if len(found := [*_BLOCK.finditer(pair[1])]) > 1:
            theirs.add(found[0].start() + pair.start(1))
    return [Block(found[1], found[2], found.start() in theirs) for found in _BLOCK.finditer(page)]


def run_page(page: str, folder: Path, *, theirs: bool = False) -> dict[str, Any]:
    """Run a page's blocks in a folder, or those of the other library alone; return the names that they define.

    Raises:
        AssertionError: A command fails, or does not print what the page shows.
    """
    names: dict[str, Any] = {"__name__": "__page__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for block in blocks(page):
            if block.is_theirs != theirs:
                continue
            if block.kind == "console":
                _run_commands(block.text)
            elif file := _FILE.match(block.text):
                with Path(file[1]).open("a", encoding="utf-8") as stream:
                    stream.write(block.text)
            else:
                exec(compile(block.text, "<block>", "exec"), names)  # noqa: S102  # the repository's own page
    finally:
        os.chdir(before)
    return names


def _run_commands(text: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    variables = {**os.environ, "PATH": path, "COLUMNS": "120"}
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=scaled(120), env=variables, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        printed = " ".join(done.stdout.split())
        for line in filter(str.strip, shown):
            assert " ".join(line.split()) in printed, f"{command} does not print {line!r}:\n{done.stdout}"
