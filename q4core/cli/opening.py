"""Opens what a command names, after a look at whether it is something that can be opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from q4core import api
from q4core.checkpoint.access import require_regular
from q4core.errors import CheckpointError

if TYPE_CHECKING:
    from q4core.checkpoint import Checkpoint

__all__ = ["input_path", "open_file"]


def input_path(file: str) -> Path:
    """Return the path that a command's FILE means.

    Raises:
        CheckpointError: It is standard input, missing, or neither a file nor a folder.
    """
    if file == "-":
        hint = "A checkpoint is mapped into memory, which a pipe can't be; save it to a file first."
        raise CheckpointError("checkpoint", name="FILE", rule="a file or a folder", value=file, hint=hint)
    path = Path(file)
    require_regular(path, or_folder=True)
    return path


def open_file(file: str, *, dialect: str | None = None) -> Checkpoint:
    """Open a checkpoint by what the user typed.

    Raises:
        CheckpointError, SchemaError, DialectError: See ``q4core.open``.
    """
    return api.open(input_path(file), dialect=dialect)
