"""``Trainer``: the usual training loop, over torch's own modules, optimizers and data loaders."""

from __future__ import annotations

import contextlib
import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_nn.trainer.buffers import copy_buffers, restore_buffers
from q4_nn.trainer.checkpoint import gather_states, load_states, restore_random, save_states, take_random
from q4_nn.trainer.progress import Progress
from q4_nn.trainer.state import State
from q4core import InputError, Q4Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Trainer", "TrainingError"]

_Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


def _can_step(scheduler: Any) -> bool:
    """Return whether a scheduler, or none, moves on without arguments."""
    if scheduler is None:
        return True
    try:
        inspect.signature(scheduler.step).bind()
    except (AttributeError, TypeError, ValueError):
        return False
    return True


class TrainingError(Q4Error, ArithmeticError):
    """A loss or a gradient is not finite; the model is as before that step."""

    code = "training"


@attrs.define(eq=False, repr=False, slots=False)
class Trainer:
    """Trains a module: forward, loss, backward, update.

    A batch is a tuple: the model's arguments, then the target. With ``step`` it is any object that ``step`` takes.

    Args:
        model: The module; for several processes wrapped in ``DistributedDataParallel`` or sharded by
            ``fully_shard``. All of them read the checkpoint, so each needs access to it.
        optimizer: Over the model's parameters.
        loss: Takes the model's result and the target, and returns the mean loss of a batch.
        max_grad_norm: Longer gradients are scaled to this length; None for no limit.
        accumulate: Batches for each update.
        scheduler: A scheduler of torch's; steps after each update, ``ReduceLROnPlateau`` after each epoch by its
            mean loss.
        callbacks: Objects with ``on_step(state)`` or ``on_epoch(state)``, or both. With ``state_dict()`` and
            ``load_state_dict(state)``, too, their state is a part of checkpoints.
        step: Takes the model and a batch and returns the loss; an alternative to ``loss``.
        checkpoint: A file to which everything that resuming needs is written, at once and whole.
        every: Updates between two checkpoints; at the end of each epoch, too.
        show: Whether to show a progress bar with loss and rate. Defaults to where stderr is a terminal.

    Raises:
        InputError: Neither or both of ``loss`` and ``step`` are given, a number is not positive, or the scheduler does
            not step without arguments.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    max_grad_norm: float | None = attrs.field(default=None, kw_only=True)
    accumulate: int = attrs.field(default=1, kw_only=True)
    scheduler: Any = attrs.field(default=None, kw_only=True)
    callbacks: Sequence[Any] = attrs.field(default=(), kw_only=True)
    step: Callable[[nn.Module, Any], torch.Tensor] | None = attrs.field(default=None, kw_only=True)
    checkpoint: Path | None = attrs.field(default=None, kw_only=True, converter=attrs.converters.optional(Path))
    every: int = attrs.field(default=0, kw_only=True)
    show: bool | None = attrs.field(default=None, kw_only=True)
    state: State = attrs.field(factory=State, init=False)
    """The progress of the training."""
    _epoch_random: dict[str, Any] = attrs.field(factory=dict, init=False)
    _buffers: Any = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        if (self.loss is None) is (self.step is None):
            value = None if self.loss is None else "both"
            raise InputError("Trainer", name="loss", rule="given, or step", value=value)
        for name, low in (("accumulate", 1), ("every", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InputError("Trainer", name=name, rule=f"a whole number from {low}", value=value)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            rule = "a positive number or None"
            raise InputError("Trainer", name="max_grad_norm", rule=rule, value=self.max_grad_norm)
        if not self._has_plateau and not _can_step(self.scheduler):
            rule = "one whose step() takes no argument, or ReduceLROnPlateau"
            raise InputError("Trainer", name="scheduler", rule=rule, value=type(self.scheduler).__name__)

    @property
    def _has_plateau(self) -> bool:
        return isinstance(self.scheduler, _Plateau)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and shows: the only one, or the one of rank 0."""
        return self._processes == 1 or torch.distributed.get_rank() == 0

    @property
    def _processes(self) -> int:
        distributed = torch.distributed
        return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

    def fit(self, loader: Iterable[Any], *, epochs: int = 1, resume: bool = False) -> State:
        """Train for some epochs, counted from the first.

        Args:
            loader: Gives the batches of an epoch, each time that it is iterated over.
            epochs: How many in all.
            resume: Whether to resume from the checkpoint where there is one. The weights become what they would have
                been without the interruption, bit for bit, where the loader draws from torch's, numpy's or Python's
                generators, or from its own ``generator``.

        Returns:
            The state at the end.

        Raises:
            InputError: The loader is empty, or gives fewer batches than before; or ``epochs`` is not positive.
            TrainingError: A loss or a gradient is not finite; it names the step, and weights and buffers are as before.
            CheckpointError: The checkpoint is damaged, or of another training, and nothing is changed; or it can't be
                written.
        """
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
            raise InputError("Trainer", name="epochs", rule="a positive whole number", value=epochs)
        if resume and self._processes > 1:
            torch.distributed.barrier()  # the first one may still be writing
        skip = self._resume(loader) if resume and self.checkpoint is not None and self.checkpoint.is_file() else None
        with Progress(show=self.show if self.is_first else False) as progress:
            while self.state.epoch < epochs and self.state.stopped is None:
                self._epoch(loader, skip, progress, epochs)
                skip = None
        return self.state

    def _resume(self, loader: Any) -> dict[str, Any] | None:
        """Load the checkpoint; return the generators' states after the last batch of its epoch."""
        found = load_states(self.checkpoint, self._parts(), loader)  # type: ignore[arg-type]  # fit looked
        self.state = State(**found["state"])
        self._epoch_random = found["epoch_random"]
        random: dict[str, Any] = found["random"]
        return random if self.state.batch else None  # the next epoch begins with what it draws itself

    def _parts(self) -> dict[str, Any]:
        model = getattr(self.model, "module", self.model)  # of a module for several processes its own
        parts = {"model": model, "optimizer": self.optimizer}
        parts |= {} if self.scheduler is None else {"scheduler": self.scheduler}
        callbacks = {f"callback {number}": item for number, item in enumerate(self.callbacks)}
        return parts | {name: item for name, item in callbacks.items() if hasattr(item, "load_state_dict")}

    def _save(self, loader: Any) -> None:
        if self.checkpoint is None:
            return
        parts = self._parts()
        states = gather_states(parts)
        if self.is_first:
            plain = {"state": attrs.asdict(self.state), "epoch_random": self._epoch_random}
            save_states(self.checkpoint, parts, states, {**plain, "random": take_random(loader)})

    def _epoch(self, loader: Any, skip: dict[str, Any] | None, progress: Progress, epochs: int) -> None:
        """Run one epoch, or what is left of it."""
        state = self.state
        self.model.train()
        if skip is None:
            self._epoch_random = take_random(loader)
            state.batch = 0
        pending: list[torch.Tensor] = []
        progress.begin(loader, state.epoch, epochs)
        self.optimizer.zero_grad(set_to_none=True)
        for batch in self._batches(loader, skip, progress):
            if not pending:
                self._buffers = copy_buffers(self.model)
            pending.append(self._backward(batch, is_last=len(pending) + 1 == self.accumulate))
            state.batch += 1
            if len(pending) == self.accumulate:
                self._update(pending)
                if state.stopped is not None or (self.every and state.step % self.every == 0):
                    self._save(loader)
                if state.stopped is not None:
                    return
        if pending:
            self._update(pending)
        self._end_epoch(loader, -(-state.batch // self.accumulate))

    def _batches(self, loader: Any, skip: dict[str, Any] | None, progress: Progress) -> Iterator[Any]:
        """Yield what is left of an epoch; the others are drawn again, so that the loader is where it was."""
        state, done = self.state, 0
        for batch in loader:
            progress.count(state.losses)
            done += 1
            if done > state.batch:
                yield batch
            elif done == state.batch and skip is not None:
                restore_random(skip, loader)
        if not done:
            raise InputError("Trainer", name="loader", rule="one that gives at least one batch", value="an empty one")
        if done < state.batch:
            rule = f"one that gives the {state.batch} batches again that this epoch had"
            raise InputError("Trainer", name="loader", rule=rule, value=done)

    def _end_epoch(self, loader: Any, updates: int) -> None:
        """Count an epoch of so many updates, call the callbacks, and write the checkpoint."""
        state = self.state
        state.epoch_losses.append(math.fsum(state.losses[-updates:]) / updates)
        state.epoch += 1
        state.batch = 0
        if self._has_plateau:
            self.scheduler.step(state.epoch_losses[-1])
        self._call("on_epoch")
        self._epoch_random = take_random(loader)
        self._save(loader)

    def _call(self, name: str) -> None:
        for callback in self.callbacks:
            if hasattr(callback, name):
                getattr(callback, name)(self.state)

    def _backward(self, batch: Any, *, is_last: bool) -> torch.Tensor:
        """Add a batch's gradients, and return its loss."""
        waits = getattr(self.model, "no_sync", None)  # gradients of several processes meet once for each update
        with contextlib.nullcontext() if is_last or waits is None else waits():
            if self.step is not None:
                loss = self.step(self.model, batch)
            else:
                *inputs, target = batch
                loss = self.loss(self.model(*inputs), target)  # type: ignore[misc]  # given where step is not
            if loss.dim():
                rule = "one number for each batch; take the mean"
                raise InputError("Trainer", name="loss", rule=rule, value=list(loss.shape))
            (loss / self.accumulate).backward()
        return loss.detach()

    def _update(self, pending: list[torch.Tensor]) -> None:
        """Update the weights by the gradients of the pending batches."""
        mean = torch.stack(pending).mean()
        if self._processes > 1:  # so that all of them stop at the same step
            torch.distributed.all_reduce(mean)
            mean /= self._processes
        loss = float(mean)
        if not math.isfinite(loss):
            self._fail("loss", loss)
        parameters = [item for item in self.model.parameters() if item.grad is not None]
        gradients = [item.grad for item in parameters if item.grad is not None]
        if len(pending) < self.accumulate:  # the last ones of an epoch weigh as much
            for gradient in gradients:
                gradient.mul_(self.accumulate / len(pending))
        norm = nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            self._fail("norm of the gradients", float(norm))
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        self.optimizer.step()
        if self.scheduler is not None and not self._has_plateau:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.losses.append(loss)
        pending.clear()
        self._call("on_step")

    def _fail(self, what: str, value: float) -> None:
        state = self.state
        self.optimizer.zero_grad(set_to_none=True)
        restore_buffers(self._buffers)
        hint = "Weights and buffers are as before this step. A lower learning rate or max_grad_norm may help."
        where = f"step {state.step}, epoch {state.epoch}, batch {state.batch}"
        raise TrainingError("training", name=what, rule="finite", value=value, where=where, hint=hint)
