"""The state of a training, and its early end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EarlyStop", "State"]


@attrs.define
class State:
    """The progress of a training; callbacks read it and may stop the training.

    Args:
        epoch: Passes over the data that are finished.
        step: Updates of the weights so far.
        batch: Batches of this epoch so far.
        losses: Mean loss of each update, over all processes.
        epoch_losses: Mean loss of each finished epoch.
        stopped: Why it was stopped, or None.
    """

    epoch: int = 0
    step: int = 0
    batch: int = 0
    losses: list[float] = attrs.field(factory=list)
    epoch_losses: list[float] = attrs.field(factory=list)
    stopped: str | None = None

    def stop(self, reason: str) -> None:
        """End the training after this step."""
        self.stopped = reason


@attrs.define
class EarlyStop:
    """A callback that stops a training whose epochs no longer improve.

    Args:
        patience: Epochs without a better one.
        measure: Returns what should fall, such as the loss over held-back data. Defaults to the epoch's mean loss.
        at_least: By how much a better one must be better.
    """

    patience: int
    measure: Callable[[], float] | None = None
    at_least: float = 0.0
    best: float = attrs.field(default=math.inf, init=False)
    bad_epochs: int = attrs.field(default=0, init=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {"best": self.best, "bad_epochs": self.bad_epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.best, self.bad_epochs = state["best"], state["bad_epochs"]

    def on_epoch(self, state: State) -> None:
        """Compare an epoch's result with the best one."""
        value = state.epoch_losses[-1] if self.measure is None else self.measure()
        if value < self.best - self.at_least:
            self.best, self.bad_epochs = value, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs >= self.patience:
            state.stop(f"{self.bad_epochs} epochs without a better one than {self.best:.6g}")
