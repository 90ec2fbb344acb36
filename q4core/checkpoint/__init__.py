"""Checkpoint files: the contract of readers and writers, which plugins bring, and the open checkpoint."""

from q4core.checkpoint.contract import CheckpointReader, CheckpointSource, CheckpointWriter, OpenRequest, SaveRequest
from q4core.checkpoint.opened import Checkpoint
from q4core.checkpoint.opening import open_by
from q4core.checkpoint.saving import save_by

__all__ = [
    "Checkpoint",
    "CheckpointReader",
    "CheckpointSource",
    "CheckpointWriter",
    "OpenRequest",
    "SaveRequest",
    "open_by",
    "save_by",
]
