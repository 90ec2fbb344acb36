"""The Spiking Heidelberg Digits, read by tonic from a file of their form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from q4_snn import LI, SHD, Network, Population, Projection
from q4core import CheckpointError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer


@pytest.fixture
def h5py(peer: Callable[[str], ModuleType]) -> Any:
    """Return h5py, where tonic is there, too."""
    peer("tonic")
    return peer("h5py")


def write(h5py: Any, path: Path, samples: list[tuple[list[float], list[int], int]]) -> None:
    """Write a file of SHD's form: seconds and neurons of each sample, its label, and what labels stand for."""
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        times = file.create_dataset("spikes/times", (len(samples),), h5py.vlen_dtype(np.float16))
        units = file.create_dataset("spikes/units", (len(samples),), h5py.vlen_dtype(np.uint16))
        for index, (seconds, neurons, _) in enumerate(samples):
            times[index], units[index] = np.array(seconds, np.float16), np.array(neurons, np.uint16)
        file["labels"] = np.array([label for *_, label in samples], np.uint16)
        file["extra/keys"] = [b"zero", b"null"]
        file["extra/speaker"] = np.zeros(len(samples), np.uint16)


SAMPLES = [([0.0, 0.25, 0.25, 0.5], [0, 699, 3, 3], 1), ([0.125], [7], 0), ([], [], 1)]


def test_samples(h5py: Any, tmp_path: Path) -> None:
    """Spikes are at their steps and neurons, for each sample of a batch; labels and what they stand for are there."""
    write(h5py, tmp_path / "SHD" / "shd_train.h5", SAMPLES)
    data = SHD(tmp_path, dt=1e-3)
    assert (len(data), data.classes) == (3, ["zero", "null"])
    source, labels = data.batch([2, 0, 1])
    assert labels.tolist() == [1, 1, 0]
    assert source.steps == 501
    found = source.draw(0, source.steps)
    assert found.nonzero().tolist() == [[0, 1, 0], [125, 2, 7], [250, 1, 3], [250, 1, 699], [500, 1, 3]]
    inputs, out = Population("inputs", 700, spikes=True), Population("out", 20, LI(20e-3, dt=1e-3))
    network = Network([inputs, out], [Projection(inputs, out)])
    with torch.no_grad():
        state = network.run(source, steps=source.steps)
    assert state is not None
    assert state.neurons["out"][0].shape == (3, 20)


def test_files_that_are_none(h5py: Any, tmp_path: Path) -> None:
    """Another file, a spike of no neuron and a sample that is not there are errors that name the file."""
    path = tmp_path / "SHD" / "shd_test.h5"
    write(h5py, path, [([0.1], [700], 0)])
    data = SHD(tmp_path, train=False)
    with pytest.raises(CheckpointError, match="neurons must be whole numbers from 0 to 699") as caught:
        data.batch([0])
    assert caught.value.where == str(path)
    with pytest.raises(InputError, match="indices must be some of 0 … 0"):
        data.batch([1])
    with h5py.File(path, "w") as file:
        file["other"] = np.zeros(3)
    with pytest.raises(CheckpointError, match="file must be one of SHD"):
        SHD(tmp_path, train=False)
    path.write_bytes(b"no data")
    with pytest.raises(CheckpointError, match="file must be one of SHD"):
        SHD(tmp_path, train=False)
