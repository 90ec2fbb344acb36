"""The progress bar of a training, where stderr is a terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

__all__ = ["Progress"]


class Progress:
    """Batches done, loss and rate; use it with ``with``.

    Args:
        show: Whether to show anything; where stderr is a terminal unless told.
    """

    def __init__(self, *, show: bool | None) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (console.is_terminal if show is None else show),
        )
        self._task: Any = None
        self._start = 0.0
        self._done = 0

    def __enter__(self) -> Progress:  # noqa: PYI034  # Self needs Python 3.11
        """Start the bar."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take it away."""
        self._bar.stop()

    def begin(self, loader: Any, epoch: int, epochs: int) -> None:
        """Begin an epoch."""
        total = len(loader) if hasattr(loader, "__len__") else None
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("", total=total, epoch=f"{epoch + 1}/{epochs}", loss="-", rate="")
        self._start, self._done = time.monotonic(), 0

    def advance(self, losses: list[float]) -> None:
        """Count one batch; ``losses`` are those of all updates so far."""
        self._done += 1
        rate = self._done / max(time.monotonic() - self._start, 1e-9)
        loss = f"{losses[-1]:.4f}" if losses else "-"
        self._bar.update(self._task, advance=1, loss=loss, rate=f", {rate:.1f} batches/s")
