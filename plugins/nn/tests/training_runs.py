"""Trainings that tests run in processes of their own: ``python training_runs.py KIND FOLDER …``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from q4_nn import State, Trainer, to_ste_

EPOCHS, BATCHES = 3, 8
KINDS = ("float", "ste", "sharded")


class KillAt:
    """A callback that ends the process at a step, as the kernel would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, state: State) -> None:
        """Look at the step."""
        if state.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def data() -> TensorDataset:
    """Return 64 samples."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 32, generator=generator)
    return TensorDataset(x, (x[:, :4].sum(-1, keepdim=True)).tanh())


def model_of(kind: str) -> nn.Module:
    """Return a model with dropout: training in four bits, or float."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1 if kind == "resume" else 0.0), nn.Linear(32, 1))
    if kind == "ste":
        to_ste_(model, "q4_0")
    return model


def trainer_of(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    """Return a trainer with a schedule and momentum, whose checkpoint is written every second step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    return Trainer(
        model,
        optimizer,
        nn.MSELoss(),
        scheduler=schedule,
        max_grad_norm=1.0,
        checkpoint=folder / "training.pt",
        every=2,
        show=False,
        **options,
    )


def resume(folder: Path, kill_at: int) -> None:
    """Train, go on from a checkpoint where there is one, and write the weights; perhaps end before."""
    model = model_of("resume")
    loader = DataLoader(data(), 8, shuffle=True)
    callbacks = [KillAt(kill_at)] if kill_at else []
    trainer_of(model, folder, callbacks=callbacks).fit(loader, epochs=EPOCHS, resume=True)
    torch.save(model.state_dict(), folder / "weights.pt")


def losses_of(kind: str, folder: Path, rank: int = 0, processes: int = 1) -> list[float]:
    """Train in one process or several with the same global batch, and return the losses."""

    def trainer() -> Trainer:
        model = model_of(kind)
        if processes > 1 and kind == "sharded":
            fully_shard(model, mesh=init_device_mesh("cpu", (processes,)))
        elif processes > 1:
            model = nn.parallel.DistributedDataParallel(model)
        return trainer_of(model, folder)

    sampler: Any = None if processes == 1 else DistributedSampler(data(), processes, rank, shuffle=False)
    loader = DataLoader(data(), 16 // processes, sampler=sampler)
    if kind == "sharded":
        trainer().fit(loader, epochs=2)  # and again from its checkpoint
    return trainer().fit(loader, epochs=5, resume=kind == "sharded").losses


def distributed(folder: Path, rank: int, processes: int) -> None:
    """Train each kind in several processes, and write the losses."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=processes)
    for kind in KINDS:
        (folder / kind).mkdir(exist_ok=True)
        losses = losses_of(kind, folder / kind, rank, processes)
        if rank == 0:
            torch.save(losses, folder / f"{kind}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "resume":
        resume(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        distributed(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        os._exit(0)  # gloo's threads may outlive Python, which aborts (pytorch issue 190489)
