"""Plugin hooks: the reader of GGUF files."""

from __future__ import annotations

from q4_gguf.reader import GgufReader
from q4core import hookimpl

__all__ = ["q4_checkpoint_readers"]


@hookimpl
def q4_checkpoint_readers() -> list[GgufReader]:
    """Return the reader."""
    return [GgufReader()]
