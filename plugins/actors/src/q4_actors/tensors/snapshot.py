"""Snapshots and statistics of a ``MutableTensor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch

__all__ = ["STATS", "MutableStats", "Snapshot"]


@attrs.frozen(eq=False)
class Snapshot:
    """The reader's own copy of one version.

    Args:
        tensor: Contiguous, detached, not shared.
        version: The version that it is a copy of.
    """

    tensor: torch.Tensor
    version: int


@attrs.frozen
class MutableStats:
    """What has happened since the tensor was made; of a ``SharedMutableTensor`` by this process, on Ray by this handle.

    Args:
        reads: ``read()`` blocks that were admitted.
        writes: Updates that took effect, by ``write()``, ``replace()`` and ``reset()``.
        snapshots: Snapshots taken.
        failures: Updates that were admitted and did not take effect.
        conflicts: ``WriteConflictError`` raised.
        copies: Copies of the whole content.
        bytes_copied: Bytes of these copies.
    """

    reads: int
    writes: int
    snapshots: int
    failures: int
    conflicts: int
    copies: int
    bytes_copied: int


STATS = tuple(field.name for field in attrs.fields(MutableStats))
