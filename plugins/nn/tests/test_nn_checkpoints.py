"""Checkpoints of a training: resumed at any instant, damaged in any place, of another training."""

from __future__ import annotations

import copy
import io
import os
import pathlib
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import q4core as q4
from q4_nn import EarlyStop, State, Trainer
from q4_nn.trainer import loop
from q4_nn.trainer.checkpoint import load_states, take_random

if TYPE_CHECKING:
    from pathlib import Path

EPOCHS, BATCHES, ACCUMULATE = 3, 4, 2


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave files in the page cache: a busy disk takes half a second for each."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Noisy(Dataset[Any]):
    """Samples to which torch's own generator adds something, as augmentations do."""

    def __len__(self) -> int:
        """Return how many there are."""
        return 4 * BATCHES

    def __getitem__(self, number: int) -> Any:
        """Return one, and its target."""
        x = torch.arange(6.0) * (number + 1) / 50 + torch.rand(6) / 10
        return x, x[:2] * 3


class Interrupt:
    """A callback that ends the training as a kill does, before what follows is written."""

    def __init__(self, step: int | None = None, epoch: int | None = None) -> None:
        self.step, self.epoch = step, epoch

    def on_step(self, state: State) -> None:
        """Look at the step."""
        if state.step == self.step:
            raise KeyboardInterrupt

    def on_epoch(self, state: State) -> None:
        """Look at the epoch."""
        if state.epoch == self.epoch:
            raise KeyboardInterrupt


def training(path: Path | None, *, own: bool = True, callbacks: Any = (), every: int = 1) -> tuple[Trainer, Any]:
    """Return a trainer with dropout, momentum and a schedule, and a loader with or without a generator of its own."""
    torch.manual_seed(1)
    random.seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    generator = torch.Generator().manual_seed(5) if own else None
    loader = DataLoader(Noisy(), 4, shuffle=True, generator=generator)
    trainer = Trainer(
        *(model, optimizer, nn.MSELoss()),
        scheduler=schedule,
        checkpoint=path,
        every=every,
        accumulate=ACCUMULATE,
        callbacks=callbacks,
        show=False,
    )
    return trainer, loader


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("end", ["epochs", "step 2", "step 3", "step 4", "epoch 1", "epoch 2"])
def test_resumed_at_any_instant(end: str, *, own: bool, tmp_path: Path) -> None:
    """Order, augmentation, dropout and weights are those of one run: of an epoch's last checkpoints and others."""
    whole, loader = training(None, own=own)
    expected = whole.fit(loader, epochs=EPOCHS)
    kind, _, number = end.partition(" ")
    callbacks = [] if kind == "epochs" else [Interrupt(**{kind: int(number)})]
    first, loader = training(tmp_path / "run.pt", own=own, callbacks=callbacks)
    if callbacks:
        with pytest.raises(KeyboardInterrupt):
            first.fit(loader, epochs=EPOCHS)
    else:
        first.fit(loader, epochs=1)
    second, loader = training(tmp_path / "run.pt", own=own)
    torch.manual_seed(77)
    found = second.fit(loader, epochs=EPOCHS, resume=True)
    assert found.losses == expected.losses
    states = whole.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_callbacks_go_on(tmp_path: Path) -> None:
    """An early stop remembers the best epoch over an interruption."""
    values = [3.0, 2.0, 2.5, 2.5, 2.5]
    first, loader = training(tmp_path / "run.pt", callbacks=[EarlyStop(2, iter(values).__next__)])
    first.fit(loader, epochs=3)
    second, loader = training(tmp_path / "run.pt", callbacks=[EarlyStop(2, iter(values[3:]).__next__)])
    state = second.fit(loader, epochs=9, resume=True)
    assert (state.epoch, state.stopped) == (4, "2 epochs without a better one than 2")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a checkpoint."""
    path = tmp_path_factory.mktemp("good") / "run.pt"
    trainer, loader = training(path)
    trainer.fit(loader)
    return path.read_bytes()


def _all_of(trainer: Trainer, loader: Any) -> Any:
    """Return a copy of everything that resuming changes."""
    parts = [trainer.model, trainer.optimizer, trainer.scheduler]
    generators = [torch.get_rng_state(), random.getstate(), loader.generator.get_state()]
    return copy.deepcopy([*(part.state_dict() for part in parts), *generators, trainer.state])


def _refused(path: Path, trainer: Trainer, loader: Any) -> str:
    """Require that a checkpoint is refused and nothing is changed, and return the message."""
    before = _all_of(trainer, loader)
    with pytest.raises(q4.CheckpointError) as caught:
        trainer.fit(loader, epochs=EPOCHS, resume=True)
    assert str(before) == str(_all_of(trainer, loader))
    assert caught.value.where == str(path)
    return str(caught.value)


def test_every_damage_is_found(good: bytes, tmp_path: Path) -> None:
    """A flipped bit anywhere, and a file cut or prolonged anywhere, is an error before anything is changed."""
    path = tmp_path / "run.pt"
    trainer, loader = training(path)
    places = random.Random(3)
    for number in range(60):
        flipped = bytearray(good)
        place = places.randrange(len(good)) if number else len(good) - 1
        flipped[place] ^= 1 << number % 8
        path.write_bytes(flipped)
        assert "a whole checkpoint of a training" in _refused(path, trainer, loader)
    for damaged in (b"", b"PK", good[:-1], good[:-73], good[: len(good) // 2], good + b"\0", good[1:], bytes(5000)):
        path.write_bytes(damaged)
        assert "a whole checkpoint of a training" in _refused(path, trainer, loader)
    path.write_bytes(good)
    assert trainer.fit(loader, epochs=2, resume=True).epoch == 2


@pytest.mark.parametrize("content", [torch.zeros(3), {"version": 1, "parts": None}, {}, [], 3])
def test_what_is_no_checkpoint_is_refused(content: Any, tmp_path: Path) -> None:
    """Another file of ``torch.save`` is an error before anything is changed."""
    path = tmp_path / "run.pt"
    torch.save(content, path)
    assert "a whole checkpoint of a training" in _refused(path, *training(path))


def test_torch_reads_it(good: bytes) -> None:
    """The digest is the zip file's comment, so that ``torch.load`` reads the parts."""
    content = torch.load(io.BytesIO(good))
    assert {*content["parts"]} == {"model", "optimizer", "scheduler"}


def test_another_training_is_refused(good: bytes, tmp_path: Path) -> None:
    """Another optimizer, schedule or kind of loader is named; nothing is changed, what was restored before neither."""
    path = tmp_path / "run.pt"
    path.write_bytes(good)
    trainer, loader = training(path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    assert "optimizer must be AdamW, got 'SGD'" in _refused(path, trainer, loader)
    trainer, loader = training(path)
    trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    assert "scheduler must be StepLR" in _refused(path, trainer, loader)
    trainer, loader = training(path)
    trainer.scheduler = None
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(q4.CheckpointError, match="scheduler must be StepLR, got None"):
        trainer.fit(loader, resume=True)
    trainer, _ = training(path)
    with pytest.raises(q4.CheckpointError, match="loader must be one with loader, sampler"):
        trainer.fit(DataLoader(Noisy(), 4), resume=True)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


class Stubborn(nn.Module):
    """A module that refuses every state, late."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self._refuse)  # type: ignore[no-untyped-call]  # torch's

    def _refuse(self, *_: Any) -> None:
        raise LookupError("not this one")


def test_what_was_restored_before_an_error_is_taken_back(tmp_path: Path) -> None:
    """Optimizer, schedule and generators are as before where the model itself refuses its state."""
    path = tmp_path / "run.pt"
    trainer, loader = training(path)
    trainer.fit(loader)
    trainer, loader = training(path)
    trainer.model.add_module("stubborn", Stubborn())
    before = _all_of(trainer, loader)[1:]
    with pytest.raises(q4.CheckpointError, match=r"model must be that of this training.*not this one"):
        trainer.fit(loader, epochs=2, resume=True)
    assert str(before) == str(_all_of(trainer, loader)[1:])


def _write(path: Path, **random_states: Any) -> None:
    """Write a checkpoint after one epoch, with other states of some generators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "take_random", lambda loader: take_random(loader) | random_states)
        trainer, loader = training(path)
        trainer.fit(loader)


@pytest.mark.parametrize("owner", ["loader", "numpy"])
def test_a_generator_that_refuses_its_state_changes_nothing(owner: str, tmp_path: Path) -> None:
    """The error comes before the model is changed, and generators whose turn came before are as they were."""
    path = tmp_path / "run.pt"
    bad = {"loader": torch.zeros(3, dtype=torch.uint8), "numpy": ["PCG64", torch.zeros(3), 0, 0, 0.0]}
    _write(path, **{owner: bad[owner]})
    trainer, loader = training(path)
    before = take_random(loader)
    assert "random must be that of this training" in _refused(path, trainer, loader)
    after = take_random(loader)
    assert before.keys() == after.keys()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert torch.equal(before["numpy"][1], after["numpy"][1])
    assert torch.equal(before["loader"], after["loader"])


class Gpus:
    """Random states of a machine's GPUs, as ``torch.cuda`` gives and takes them."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.states = [torch.full((16,), number, dtype=torch.uint8) for number in range(count)]
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: [*self.states])
        patch.setattr(torch.cuda, "set_rng_state_all", self._restore)

    def _restore(self, states: list[torch.Tensor]) -> None:
        for number, state in enumerate(states):
            self.states[number] = state


@pytest.mark.parametrize(("written", "here"), [(1, 1), (2, 2), (1, 2), (2, 1), (3, 2)])
def test_random_states_of_gpus(written: int, here: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of GPUs are restored all, or refused with their number where there are fewer GPUs, and none is changed."""
    path = tmp_path / "run.pt"
    states = [torch.full((16,), 100 + number, dtype=torch.uint8) for number in range(written)]
    _write(path, cuda=states)
    trainer, loader = training(path)
    gpus = Gpus(monkeypatch, here)
    before = [*gpus.states]
    if written > here:
        message = _refused(path, trainer, loader)
        assert f"GPUs must be {written} at least, whose random states it has, got {here}" in message
        assert "CUDA_VISIBLE_DEVICES" in message
        assert all(map(torch.equal, gpus.states, before))
    else:
        load_states(path, trainer._parts(), loader)
        assert all(map(torch.equal, gpus.states, [*states, *before[written:]]))


def test_what_torch_does_not_read_again_is_an_error(tmp_path: Path) -> None:
    """A state of other classes than torch's own is a typed error when it is read."""
    path = tmp_path / "run.pt"
    trainer, loader = training(path)
    trainer.scheduler.of_a_user = pathlib.PurePath("x")
    trainer.fit(loader)
    assert "readable by torch.load" in _refused(path, *training(path))


def test_fewer_batches_are_refused(tmp_path: Path) -> None:
    """A loader that ends before the place of the interruption is an error, not a shorter epoch."""
    path = tmp_path / "run.pt"
    first, loader = training(path, callbacks=[Interrupt(step=2)], own=False)
    first.checkpoint, first.every = path, 1
    with pytest.raises(KeyboardInterrupt):
        first.fit(loader)
    second, loader = training(path, own=False)
    with pytest.raises(q4.InputError, match="loader must be one that gives the 2 batches again"):
        second.fit([*loader][:1], resume=True)


def test_files_of_killed_writers_go(tmp_path: Path) -> None:
    """What a killed training was writing is removed by the next one; other files stay."""
    path = tmp_path / "run.pt"
    for name in (".run.pt.abcdefgh.tmp", ".run.pt.note.tmp", ".other.pt.abcdefgh.tmp"):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (1, 1))
    trainer, loader = training(path)
    trainer.fit(loader)
    assert sorted(item.name for item in tmp_path.iterdir()) == [".other.pt.abcdefgh.tmp", ".run.pt.note.tmp", "run.pt"]


def test_a_checkpoint_that_can_not_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, what can't be pickled and a folder in its place are typed errors; the older checkpoint stays."""
    path = tmp_path / "run.pt"
    trainer, loader = training(path)
    trainer.fit(loader)
    old = path.read_bytes()

    def full(*_: Any) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(q4.CheckpointError, match="can't be written"):
        trainer.fit(loader, epochs=2)
    assert [item.name for item in tmp_path.iterdir()] == ["run.pt"]
    assert path.read_bytes() == old
    monkeypatch.undo()
    trainer.scheduler.of_a_user = lambda: 0
    with pytest.raises(q4.CheckpointError, match="can't be written"):
        trainer.fit(loader, epochs=4)
    assert path.read_bytes() == old
    trainer, loader = training(tmp_path)
    with pytest.raises(q4.CheckpointError, match="can't be written"):
        trainer.fit(loader)
