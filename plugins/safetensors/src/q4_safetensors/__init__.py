"""Reader and writer of safetensors checkpoints."""

from __future__ import annotations

from q4_safetensors.reader import SafetensorsReader
from q4_safetensors.writer import SafetensorsWriter
from q4core import hookimpl

__all__ = ["SafetensorsReader", "SafetensorsWriter", "q4_checkpoint_readers", "q4_checkpoint_writers"]


@hookimpl
def q4_checkpoint_readers() -> list[SafetensorsReader]:
    """Return the reader."""
    return [SafetensorsReader()]


@hookimpl
def q4_checkpoint_writers() -> list[SafetensorsWriter]:
    """Return the writer."""
    return [SafetensorsWriter()]
