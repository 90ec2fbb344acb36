"""Checkpoint files: lazy, mapped reading, and atomic writing, of safetensors in one file or several.

Readers of other kinds of files come from plugins.
"""

from q4core.checkpoint.opened import Checkpoint, DenseTensors
from q4core.checkpoint.reading import SafetensorsReader, open_checkpoint
from q4core.checkpoint.source import CheckpointReader, CheckpointSource
from q4core.checkpoint.writing import save_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointReader",
    "CheckpointSource",
    "DenseTensors",
    "SafetensorsReader",
    "open_checkpoint",
    "save_checkpoint",
]
