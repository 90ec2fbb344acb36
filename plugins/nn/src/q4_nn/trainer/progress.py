"""The progress bar of a training, where stderr is a terminal."""

from __future__ import annotations

import time
from typing import Any

from rich import progress
from rich.console import Console

__all__ = ["Progress"]


class Progress(progress.Progress):
    """Batches done, loss and rate; use it with ``with``.

    Args:
        show: Whether to show anything. Defaults to where stderr is a terminal.
    """

    def __init__(self, *, show: bool | None) -> None:
        console = Console(stderr=True)
        super().__init__(
            progress.TextColumn("epoch {task.fields[epoch]}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]}{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (console.is_terminal if show is None else show),
        )
        self._epoch: Any = None
        self._began = 0.0
        self._batches = 0

    def begin(self, loader: Any, epoch: int, epochs: int) -> None:
        """Begin an epoch."""
        total = len(loader) if hasattr(loader, "__len__") else None
        if self._epoch is not None:
            self.remove_task(self._epoch)
        self._epoch = self.add_task("", total=total, epoch=f"{epoch + 1}/{epochs}", loss="-", rate="")
        self._began, self._batches = time.monotonic(), 0

    def count(self, losses: list[float]) -> None:
        """Count one batch; ``losses`` are those of all updates so far."""
        self._batches += 1
        rate = self._batches / max(time.monotonic() - self._began, 1e-9)
        loss = f"{losses[-1]:.4f}" if losses else "-"
        self.update(self._epoch, advance=1, loss=loss, rate=f", {rate:.1f} batches/s")
