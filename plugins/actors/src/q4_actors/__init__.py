"""Tensors that threads or processes share: one writer, many readers, whole versions only (``docs/memory.md``)."""

from q4_actors.arguments import MutableMode
from q4_actors.blocks import ReadView, WriteBlock
from q4_actors.shared import SharedMutableTensor
from q4_actors.snapshot import MutableStats, Snapshot
from q4_actors.tensor import MutableTensor

__all__ = ["MutableMode", "MutableStats", "MutableTensor", "ReadView", "SharedMutableTensor", "Snapshot", "WriteBlock"]
