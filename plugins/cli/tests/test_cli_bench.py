"""``q4 bench``: what it measures, and that it checks what it measures."""

from __future__ import annotations

import attrs
import pytest
import torch

import q4core as q4
from q4_cli.timing import copies_for, quantile, require_right, time_calls
from tests.support.commands import MODEL, answer, say
from tests.support.fakes import registry

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.mark.usefixtures("reference_alone")
def test_bench_measures_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    """Each M has its samples, and every number that is shown follows from them."""
    words = ["bench", "--shape", "64x128", "--format", "nf4", "--m", "1,4", "--seconds", "0.02", "--device", "cpu"]
    record = answer(capsys, *words)
    assert [item["m"] for item in record["results"]] == [1, 4]
    assert record["machine"]["torch_threads"] == torch.get_num_threads()
    for item in record["results"]:
        samples = sorted(item["samples_us"])
        assert len(samples) >= 5
        assert samples[0] <= item["p10_us"] <= item["median_us"] <= item["p90_us"] <= samples[-1]
        assert item["packed_bytes_per_s"] == round(item["packed_bytes"] / (item["median_us"] * 1e-6))
        share = item["packed_bytes_per_s"] / record["copy_bytes_per_s"]
        assert item["share_of_copy"] == pytest.approx(share, abs=1e-4)
        assert 0 <= item["error_over_bound"] <= 1
        assert item["backend"] == "dequant-fallback"
    assert "dequant_matmul" in say(capsys, *words)


def test_bench_takes_one_layer_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file, each kind of layer is measured once, with how many are like it; ``--layer`` names one."""
    words = ["bench", MODEL, "--m", "1", "--seconds", "0.01"]
    record = answer(capsys, *words)
    layers = answer(capsys, "inspect", MODEL)["layers"]
    assert sum(item["layers_like_it"] for item in record["results"]) == len(layers)
    name = layers[-1]["name"]
    assert [item["layer"] for item in answer(capsys, *words, "--layer", name)["results"]] == [name]


def test_bench_refuses_wrong_answers() -> None:
    """A path whose numbers are off is not timed; the error is a typed one with the ratio."""
    weight = q4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), "nf4")
    with q4.Session(registry=registry()) as session:
        layer = session.linear(weight)
        path = layer.diagnostics().segments[0].path
        assert require_right(layer, weight, path, 3) <= 1
        twice = attrs.evolve(weight, scale=weight.scale * 1.001)
        with pytest.raises(q4.BackendError) as caught:
            require_right(layer, twice, path, 3)
    assert isinstance(caught.value.value, float)
    assert caught.value.value > 1


def test_timing_rotates_through_the_calls() -> None:
    """Every call gets its turn, at least five are measured, and quantiles are samples."""
    turns: list[int] = []
    calls = [lambda index=index: turns.append(index) for index in range(3)]
    assert len(time_calls(calls, torch.device("cpu"), 1e-9)) == 5
    assert turns[-5:] == [0, 1, 2, 0, 1]
    assert (quantile(range(10, 0, -1), 0.1), quantile(range(1, 11), 0.9)) == (2, 10)


def test_copies_exceed_the_caches_and_fit_the_memory() -> None:
    """A small weight is copied until it exceeds the caches, a huge one is not copied, a warm one never."""
    assert copies_for(1 << 20, is_cold=True) * (1 << 20) >= 64 << 20
    assert copies_for(1 << 50, is_cold=True) == 1
    assert copies_for(1 << 20, is_cold=False) == 1
