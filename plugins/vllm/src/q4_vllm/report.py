"""The report of a worker: its packed layers, once they are prepared, as events and as one line of vLLM's log."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from q4core.plugin_api import counted, emit

if TYPE_CHECKING:
    from collections.abc import Iterable

    import q4core as q4

__all__ = ["rank_of", "report"]


def rank_of() -> tuple[int, int]:
    """Return this process's rank, and how many there are."""
    distributed = torch.distributed
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def report(sessions: Iterable[q4.Session], logger: Any) -> None:
    """Send ``q4.vllm.layer`` for each packed layer of this process and ``q4.vllm.worker`` for all of them.

    Args:
        sessions: What the layers were prepared under.
        logger: vLLM's, which gets one line.
    """
    records = [record for session in sessions for record in session.report().layers]
    for record in records:
        emit("q4.vllm.layer", level=logging.INFO, layer=record.layer, **record.summary())
    rank, _ = rank_of()
    prepared = sum(record.prepared_bytes for record in records)
    runners = Counter(f"{record.backend} {record.format}" for record in records)
    served = ", ".join(f"{runner} ({count})" for runner, count in runners.most_common())
    emit("q4.vllm.worker", level=logging.INFO, rank=rank, layers=len(records), prepared_bytes=prepared, served=served)
    layers = counted(len(records), "packed layer")
    logger.info("q4: rank %d has %s, %.1f MB prepared: %s", rank, layers, prepared / 1e6, served)
