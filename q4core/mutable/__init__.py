"""Tensors that threads share: one writer at a time, many readers, whole versions only (``docs/memory.md``)."""

from q4core.mutable.content import MutableStats, ReadView, Snapshot, WriteBlock
from q4core.mutable.tensor import MutableMode, MutableTensor

__all__ = ["MutableMode", "MutableStats", "MutableTensor", "ReadView", "Snapshot", "WriteBlock"]
