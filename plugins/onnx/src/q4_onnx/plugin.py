"""Plugin hooks: the reader of ONNX files."""

from __future__ import annotations

from q4_onnx.reader import OnnxReader
from q4core import hookimpl

__all__ = ["q4_checkpoint_readers"]


@hookimpl
def q4_checkpoint_readers() -> list[OnnxReader]:
    """Return the reader."""
    return [OnnxReader()]
