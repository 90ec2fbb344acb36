"""The training loop: against a loop by hand, killed and resumed, in two processes, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import training_runs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import q4core as q4
from q4_nn import EarlyStop, State, Trainer, TrainingError, instrument
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

RUNS = Path(training_runs.__file__)


def run(*arguments: object, check: bool = True) -> int:
    """Run a training in a process of its own, and return how it ended."""
    done = run_interpreter([str(RUNS), *map(str, arguments)])
    assert not check or done.returncode == 0, done.stderr
    return done.returncode


def small() -> tuple[nn.Module, DataLoader[Any]]:
    """Return a model and ten batches of four."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    return nn.Linear(6, 2), DataLoader(TensorDataset(x, x[:, :2] * 3), 4)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Return plain gradient descent."""
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_loop_is_the_usual_one(accumulate: int) -> None:
    """Weights, losses and rate are those of a loop by hand: accumulated, clipped, scheduled, the last batches too."""
    model, loader = small()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    trainer = Trainer(model, optimizer, nn.MSELoss(), accumulate=accumulate, max_grad_norm=0.5, scheduler=scheduler)
    state = trainer.fit(loader, epochs=2)

    other, _ = small()
    optimizer = sgd(other)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses = []
    for _ in range(2):
        batches = [*loader]
        for start in range(0, len(batches), accumulate):
            group = batches[start : start + accumulate]
            loss = torch.stack([nn.functional.mse_loss(other(x), y) for x, y in group]).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            losses.append(float(loss.detach()))
    assert state.losses == pytest.approx(losses, rel=1e-5)
    assert (state.step, state.epoch) == (len(losses), 2)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights of a training that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    run("resume", folder, 0)
    return torch.load(folder / "weights.pt")


@pytest.mark.parametrize("kill_at", [13, *(pytest.param(step, marks=pytest.mark.soak) for step in (1, 3, 8, 16, 20))])
def test_killed_and_resumed(kill_at: int, uninterrupted: Any, tmp_path: Path) -> None:
    """A training that is killed at any step and started again ends with the very weights of one that was not."""
    assert run("resume", tmp_path, kill_at, check=False) == -9
    assert not (tmp_path / "weights.pt").exists()
    run("resume", tmp_path, 0)
    found = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(uninterrupted[name], found[name]) for name in uninterrupted)
    assert not [*tmp_path.glob(".training*")]


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which two processes left the losses of each kind of training."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, str(RUNS), "distributed", str(folder)]
    others = [subprocess.Popen([*command, str(rank), "2"], stderr=subprocess.PIPE) for rank in range(2)]
    errors = [other.communicate(timeout=scaled(240))[1].decode() for other in others]
    assert [other.returncode for other in others] == [0, 0], "".join(errors)
    return folder


@pytest.mark.parametrize("kind", training_runs.KINDS)
def test_two_processes(kind: str, of_two_processes: Path, tmp_path: Path) -> None:
    """Two processes with the same global batch follow the loss of a single one over 20 steps.

    Those that share the weights out (FSDP2) go on from a checkpoint on the way, which a single process reads, too.
    """
    one, two = training_runs.losses_of(kind, tmp_path), torch.load(of_two_processes / f"{kind}.pt")
    assert len(one) == len(two) == 20
    assert two[-1] == pytest.approx(one[-1], rel=2e-2)
    if kind == "ste":
        return
    assert two == pytest.approx(one, rel=1e-5)
    model = training_runs.model_of(kind)
    training_runs.trainer_of(model, of_two_processes / kind).fit([None], epochs=5, resume=True)
    mine = torch.load(tmp_path / "training.pt")["parts"]["model"]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, mine[name], rtol=1e-4, atol=1e-5)


def test_a_step_of_ones_own() -> None:
    """A function of model and batch takes the place of the loss, for batches of any form."""
    model, loader = small()
    batches = [{"x": x, "y": y} for x, y in loader]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    state = Trainer(model, sgd(model), step=step).fit(batches, epochs=3)
    assert state.epoch_losses[-1] < state.epoch_losses[0]


def test_it_stops_early() -> None:
    """Epochs that no longer get better end the training, and it says why."""
    model, loader = small()
    values = iter([3.0, 2.0, 2.5, 2.5, 2.5])
    state = Trainer(model, sgd(model), nn.MSELoss(), callbacks=[EarlyStop(2, lambda: next(values))]).fit(
        loader, epochs=9
    )
    assert (state.epoch, state.stopped) == (4, "2 epochs without a better one than 2")


def test_a_callback_stops_at_a_step() -> None:
    """A callback sees each step, and may end the training there."""

    class Stop:
        def on_step(self, state: State) -> None:
            if state.step == 7:
                state.stop("seen enough")

    model, loader = small()
    state = Trainer(model, sgd(model), nn.MSELoss(), callbacks=[Stop()]).fit(loader, epochs=9)
    assert (state.step, state.batch, state.stopped) == (7, 7, "seen enough")


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("what", ["loss", "norm of the gradients"])
def test_it_stops_at_what_is_not_finite(what: str, limit: float | None) -> None:
    """A loss or gradient that is not finite ends it, names the step, and leaves the weights as they were."""
    model, loader = small()
    batches = [*loader]
    if what == "loss":
        batches[4][0][0, 0] = float("inf")
    seen: list[list[torch.Tensor]] = []

    def step(model: Any, batch: Any) -> torch.Tensor:
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if what == "loss" or len(seen) < 5:
            return loss
        total = model.weight.sum()
        steep: torch.Tensor = loss + (total - total.detach()).sqrt()  # zero, of infinite slope
        return steep

    with pytest.raises(TrainingError, match=f"{what} must be finite") as caught:
        Trainer(model, sgd(model), step=step, max_grad_norm=limit).fit(batches)
    assert caught.value.where == "step 4, epoch 0, batch 5"
    assert all(map(torch.equal, seen[-1], model.parameters()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_buffers_are_as_before_what_is_not_finite(accumulate: int) -> None:
    """After a loss that is not finite, running means and counts are those before the step, as the weights are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2), nn.BatchNorm1d(2, momentum=None))
    x = torch.randn(40, 6)
    x[33] = float("nan")
    batches = [(x[start : start + 4], x[start : start + 4, :2]) for start in range(0, 40, 4)]
    trainer = Trainer(model, sgd(model), nn.MSELoss(), accumulate=accumulate)
    good = len(batches) - 2  # the last but one is bad
    trainer.fit(batches[:good])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TrainingError, match="Weights and buffers are as before"):
        trainer.fit(batches[good:], epochs=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert int(before["0.num_batches_tracked"]) == good
    assert model.eval()(torch.zeros(1, 6)).isfinite().all()


def test_a_plateau_is_seen_by_epochs(tmp_path: Path) -> None:
    """``ReduceLROnPlateau`` moves on behind each epoch by its mean loss, over an interruption too."""
    seen: list[float] = []

    class Schedule(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]  # as torch's own
            seen.append(metrics)
            super().step(1.0, epoch)  # never better than the first

    def trainer() -> tuple[Trainer, Any]:
        model, loader = small()
        optimizer = sgd(model)
        schedule = Schedule(optimizer, patience=1, factor=0.5)
        return Trainer(model, optimizer, nn.MSELoss(), scheduler=schedule, checkpoint=tmp_path / "run.pt"), loader

    first, loader = trainer()
    assert first.fit(loader, epochs=2).epoch_losses == seen
    assert first.optimizer.param_groups[0]["lr"] == 0.05
    second, loader = trainer()
    assert second.fit(loader, epochs=3, resume=True).epoch_losses == seen
    assert second.optimizer.param_groups[0]["lr"] == 0.025


def test_schedulers_that_ask_for_more_are_refused() -> None:
    """What can't move on without arguments is refused before the first update."""
    model, _ = small()
    optimizer = sgd(model)

    class Asking:
        def step(self, metrics: Any) -> None:
            raise AssertionError(metrics)

    for scheduler in (Asking(), object(), 3):
        with pytest.raises(q4.InputError, match=r"scheduler must be one whose step\(\) takes no argument"):
            Trainer(model, optimizer, nn.MSELoss(), scheduler=scheduler)


BAD: dict[str, tuple[Callable[[nn.Module, Any], object], str]] = {
    "empty loader": (lambda model, _: Trainer(model, sgd(model), nn.MSELoss()).fit([]), "at least one batch"),
    "no loss": (lambda model, _: Trainer(model, sgd(model)), "loss must be given, or step"),
    "accumulate": (lambda model, _: Trainer(model, sgd(model), nn.MSELoss(), accumulate=0), "a whole number from 1"),
    "norm": (lambda model, _: Trainer(model, sgd(model), nn.MSELoss(), max_grad_norm=-1.0), "a positive number"),
    "epochs": (lambda model, data: Trainer(model, sgd(model), nn.MSELoss()).fit(data, epochs=0), "a positive whole"),
    "losses": (
        lambda model, data: Trainer(model, sgd(model), nn.MSELoss(reduction="none")).fit(data),
        "one number for each batch",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str) -> None:
    """What can't be trained is a typed error that says why."""
    call, message = BAD[name]
    with pytest.raises(q4.InputError, match=message):
        call(*small())


def test_bad_checkpoints(tmp_path: Path) -> None:
    """A checkpoint that is damaged, or of another model or optimizer, is named; nothing is changed."""
    model, loader = small()
    path = tmp_path / "training.pt"
    Trainer(model, sgd(model), nn.MSELoss(), checkpoint=path).fit(loader)
    whole = path.read_bytes()
    other = nn.Linear(6, 3)
    with pytest.raises(q4.CheckpointError, match=r"tensor 'bias'.*another model") as caught:
        Trainer(other, sgd(other), nn.MSELoss(), checkpoint=path).fit(loader, resume=True)
    assert caught.value.where == str(path)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for damaged in (whole[:-200], b"", b"no checkpoint", whole.replace(b"torch_utils", b"torch_uglis", 1)):
        path.write_bytes(damaged)
        if damaged[-50:] == whole[-50:]:
            continue  # the name is not there: nothing was changed
        with pytest.raises(q4.CheckpointError, match="a whole checkpoint"):
            Trainer(model, sgd(model), nn.MSELoss(), checkpoint=path).fit(loader, resume=True)
    path.write_bytes(whole)
    adam = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
    with pytest.raises(q4.CheckpointError, match="optimizer must be SGD, got 'AdamW'"):
        Trainer(model, adam, nn.MSELoss(), checkpoint=path).fit(loader, resume=True)
    assert all(map(torch.equal, before, model.parameters()))


def test_costs_of_layers() -> None:
    """Each innermost layer's calls, bytes and new tensors are counted, forward and backward, and shown as a table."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Flatten(0), nn.Unflatten(0, (-1, 4)))
    x = torch.randn(3, 8, requires_grad=True)
    with instrument(model) as costs:
        for _ in range(2):
            model(x).sum().backward()
    model(x)
    linear = costs["0"]
    assert (linear.forward_calls, linear.backward_calls, linear.weight_bytes) == (2, 2, 4 * (8 * 4 + 4))
    assert (linear.output_bytes, linear.new_tensors) == (2 * 4 * 12, 2)
    assert costs["2"].new_tensors == 0
    assert 0 < linear.forward_seconds < scaled(10)
    assert 0 < linear.backward_seconds < scaled(10)
    assert [cost.name for cost in costs] == ["0", "1", "2", "3"] == [row["name"] for row in costs.to_dict()]
    assert "new tensors" in str(costs)
    assert "Unflatten" in str(costs)
    with pytest.raises(q4.InputError, match=r"an nn\.Module"):
        instrument(3)  # type: ignore[arg-type]  # on purpose
