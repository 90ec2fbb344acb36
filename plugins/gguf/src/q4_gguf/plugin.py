"""Plugin hooks: the reader and the writer of GGUF files."""

from __future__ import annotations

from q4_gguf.reader import GgufReader
from q4_gguf.writer import GgufWriter
from q4core import hookimpl

__all__ = ["q4_checkpoint_readers", "q4_checkpoint_writers"]


@hookimpl
def q4_checkpoint_readers() -> list[GgufReader]:
    """Return the reader."""
    return [GgufReader()]


@hookimpl
def q4_checkpoint_writers() -> list[GgufWriter]:
    """Return the writer."""
    return [GgufWriter()]
