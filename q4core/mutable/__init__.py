"""Tensors that threads or processes share: one writer, many readers, whole versions only (``docs/memory.md``)."""

from q4core.mutable.arguments import MutableMode
from q4core.mutable.blocks import ReadView, WriteBlock
from q4core.mutable.records import MutableStats, Snapshot
from q4core.mutable.shared import SharedMutableTensor
from q4core.mutable.tensor import MutableTensor

__all__ = ["MutableMode", "MutableStats", "MutableTensor", "ReadView", "SharedMutableTensor", "Snapshot", "WriteBlock"]
