"""Pictures, data and measures: what is drawn and read and counted, and what is refused."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

import q4core as q4
from q4_nn import pack_
from q4_snn import LI, LIF, SHD, Network, Population, Projection, neurobench, plot, spikegen
from q4core import CheckpointError, ConfigError, InputError, PluginError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_windows() -> Iterator[None]:
    """Draw into memory."""
    plt.switch_backend("agg")
    yield
    plt.close("all")


def spikes() -> torch.Tensor:
    """Return spikes [T, B, n]."""
    return spikegen.rate(torch.full((2, 5), 0.2), 50, generator=torch.Generator().manual_seed(0))


def test_raster() -> None:
    """There is one point for each spike of a sample, at its time and neuron; events and dense spikes give the same."""
    x = spikes()
    places = []
    for given in (x, x.nonzero(), x[:, 1]):
        ax = plot.raster(given, dt=2e-3, sample=0 if given.dim() == 2 and given.shape[1] == 5 else 1)
        places.append(np.asarray(ax.collections[0].get_offsets()))
    step, neuron = x[:, 1].nonzero(as_tuple=True)
    for found in places:
        np.testing.assert_allclose(found, np.stack([step * 2e-3, neuron], 1), atol=1e-9)
    assert ax.get_xlabel() == "time (s)"


def test_rates_and_membranes() -> None:
    """Rates are means over a window in spikes a second; membranes are lines of the neurons asked for."""
    x = spikes()
    ax = plot.rates(x, dt=1e-3, window=10e-3, sample=1)
    time, rate = ax.lines[0].get_data()
    assert len(rate) == 41
    assert float(time[0]) == pytest.approx(5e-3)
    assert float(rate[7]) == pytest.approx(float(x[7:17, 1].mean()) * 1e3, rel=1e-5)
    own = plt.subplots()[1]
    assert plot.membrane(x * 0.5, neurons=[4, 2], threshold=1.0, ax=own) is own
    assert len(own.lines) == 3
    np.testing.assert_array_equal(own.lines[0].get_ydata(), x[:, 0, 4] * 0.5)


def test_pictures_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of other shapes, samples and neurons that are not there, and a missing matplotlib are typed errors."""
    x: Any = spikes()
    call: Any
    for call, name in (
        (lambda: plot.raster(x[0, 0]), "values"),
        (lambda: plot.raster(x, sample=2), "sample"),
        (lambda: plot.rates(x, window=1.0), "window"),
        (lambda: plot.membrane(x, neurons=[5]), "neurons"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.name == name
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PluginError, match=r"package matplotlib must be installed.*q4-snn\[plot\]"):
        plot.raster(x)


def test_measures_by_hand() -> None:
    """Operations are those of single spikes and weights, and sparsities and bytes those of the network's tensors."""
    torch.manual_seed(0)
    pixels, hidden = Population("pixels", 64), Population("hidden", 32, LIF.from_beta(0.9))
    out = Population("out", 4, LI(1e-3))
    network = Network([pixels, hidden, out], [Projection(pixels, hidden, bias=True), Projection(hidden, out, delay=2)])
    x = torch.rand(20, 3, 64) * (torch.rand(20, 3, 64) < 0.5)
    with torch.no_grad():
        projections: list[Any] = [*network.projections.values()]
        first, second = (item.synapses.weight for item in projections)
        first[:, :8] = 0
        fired = network(x, record=("hidden",))[0]["hidden"]
        macs = sum(int((first[:, k] != 0).sum()) for t, b, k in x.nonzero().tolist())
        sums = sum(int((second[:, k] != 0).sum()) for t, b, k in fired.nonzero().tolist() if t < 18)
        found = neurobench.measure(network, x)
    assert fired.sum() > 20
    assert found["synaptic_operations"] == {
        "Effective_MACs": pytest.approx(macs / 3),
        "Effective_ACs": pytest.approx(sums / 3),
        "Dense": 20 * (64 * 32 + 32 * 4),
    }
    assert found["activation_sparsity"] == pytest.approx(1 - float(fired.mean()))
    assert found["connection_sparsity"] == pytest.approx(8 * 32 / (64 * 32 + 32 * 4))
    assert found["footprint"] == 4 * (64 * 32 + 32 + 32 * 4)


def test_footprint_of_packed_synapses() -> None:
    """Packed synapses take their codes and scales: half a byte each, and a scale for 64."""
    torch.manual_seed(0)
    a, b = Population("a", 128, spikes=True), Population("b", 64, LIF(1e-3))
    network = Network([a, b], [Projection(a, b, format="nf4")])
    x = spikegen.rate(torch.full((1, 128), 0.1), 5)
    dense = neurobench.measure(network, x)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        pack_(network, session)
        packed = neurobench.measure(network, x)
        assert dense["footprint"] == 4 * 128 * 64
        assert packed["footprint"] == 128 * 64 // 2 + 4 * 128 * 64 // 64
        assert packed["synaptic_operations"] == dense["synaptic_operations"]


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file of data, and a missing package, are errors that say what to do."""
    with pytest.raises(CheckpointError, match=r"file must be there.*zenkelab"):
        SHD(tmp_path)
    with pytest.raises(ConfigError, match="dt must be above 0"):
        SHD(tmp_path, dt=0.0)
    (tmp_path / "SHD").mkdir()
    (tmp_path / "SHD" / "shd_train.h5").write_bytes(b"no data")
    monkeypatch.setitem(sys.modules, "tonic", None)
    with pytest.raises(PluginError, match=r"package tonic must be installed.*q4-snn\[shd\]"):
        SHD(tmp_path)
