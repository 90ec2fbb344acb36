"""The cortical microcircuit of Potjans and Diesmann (2014): eight populations, synapses of four bits.

    python examples/microcircuit.py [--scale 0.1] [--seconds 2] [--picture microcircuit.png]

Numbers of neurons and in-degrees are scaled alike. Weights grow by the root of what in-degrees lose, and a constant
current makes up for the mean input, so that mean and variance of the input stay (van Albada et al. 2015). Neurons
integrate exactly, in steps of 0.1 ms; each also gets Poisson input from outside. Times are those of NEST's
``iaf_psc_exp``, where a spike acts in the step after the one in which it arrives.

The picture needs matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from q4_snn import CubaLIF, LayerProjection, Network, PoissonInput, Population, Recorder, SparseProjection

NAMES = ("L2/3E", "L2/3I", "L4E", "L4I", "L5E", "L5I", "L6E", "L6I")
NEURONS = torch.tensor([20683, 5834, 21915, 5479, 4850, 1065, 14395, 2948])
EXTERNAL = torch.tensor([1600.0, 1500, 2100, 1900, 2000, 1900, 2900, 2100])  # synapses from outside
RATES = torch.tensor([0.971, 2.868, 4.746, 5.396, 8.142, 9.078, 0.991, 7.523])  # spikes/s at full size
CHANCES = torch.tensor(
    [  # that a pair is joined, at least once: row target, column source
        [0.1009, 0.1689, 0.0437, 0.0818, 0.0323, 0, 0.0076, 0],
        [0.1346, 0.1371, 0.0316, 0.0515, 0.0755, 0, 0.0042, 0],
        [0.0077, 0.0059, 0.0497, 0.1350, 0.0067, 0.0003, 0.0453, 0],
        [0.0691, 0.0029, 0.0794, 0.1597, 0.0033, 0, 0.1057, 0],
        [0.1004, 0.0622, 0.0505, 0.0057, 0.0831, 0.3726, 0.0204, 0],
        [0.0548, 0.0269, 0.0257, 0.0022, 0.0600, 0.3158, 0.0086, 0],
        [0.0156, 0.0066, 0.0211, 0.0166, 0.0572, 0.0197, 0.0396, 0.2252],
        [0.0364, 0.0010, 0.0034, 0.0005, 0.0277, 0.0080, 0.0658, 0.1443],
    ],
    dtype=torch.float64,
)
STEP, MEMBRANE, SYNAPSE, CAPACITY, REFRACTORY = 0.1, 10.0, 0.5, 250.0, 20  # ms, ms, ms, pF, steps
THRESHOLD, START, START_SPREAD, BACKGROUND = 15.0, 7.0, 10.0, 8.0  # mV above rest, where a spike resets to; spikes/s
_AT_ONCE = 1 << 21  # numbers of the input that are in memory: 8 MB
AMPLITUDE, WEIGHT_SPREAD, DELAY_SPREAD = 87.81, 0.1, 0.5  # pA (a PSP of 0.15 mV); of the mean


class Model(NamedTuple):
    """The circuit at one scale: P populations, in pA, steps of 0.1 ms and spikes/s."""

    sizes: list[int]  # neurons
    counts: torch.Tensor  # [P, P] synapses, row target, column source
    weight: torch.Tensor  # [P, P]
    delay: torch.Tensor  # [P, P], in steps
    current: torch.Tensor  # [P], constant
    outside: torch.Tensor  # [P], spikes/s from outside for each neuron
    outside_weight: float


def scaled(scale: float) -> Model:
    """Return the circuit with that share of its neurons and in-degrees."""
    full = NEURONS.double()
    degrees = torch.log1p(-CHANCES) / torch.log1p(-1 / (full[:, None] * full)) / full[:, None]  # synapses of a target
    sizes = (full * scale).long()
    weight = AMPLITUDE * torch.tensor([1.0, -4.0], dtype=torch.float64).repeat(4).expand(8, 8).clone()
    weight[0, 2] *= 2
    mean = (weight * degrees) @ RATES.double() + AMPLITUDE * BACKGROUND * EXTERNAL
    current = 1e-3 * SYNAPSE * (1 - math.sqrt(scale)) * mean
    counts = (degrees * scale * sizes[:, None]).round().long()
    delay = torch.tensor([15.0, 7.5]).repeat(4).expand(8, 8)
    outside, grown = BACKGROUND * EXTERNAL * scale, 1 / math.sqrt(scale)
    return Model(sizes.tolist(), counts, weight * grown, delay, current, outside, AMPLITUDE * grown)


def build(model: Model, seed: int) -> Network:
    """Draw the circuit: one population of all neurons, what reaches it from outside, and its synapses."""
    of_each = torch.tensor(model.sizes)
    decay, leak = math.exp(-STEP / SYNAPSE), math.exp(-STEP / MEMBRANE)
    charge = MEMBRANE * SYNAPSE / (CAPACITY * (SYNAPSE - MEMBRANE)) * (decay - leak)  # mV of a pA of synaptic current
    neuron = CubaLIF(
        1e-3 * STEP / (1 - leak),  # one Euler step of this time constant decays as exactly as MEMBRANE does
        1e-3 * STEP / (1 - decay),
        r=charge / (1 - leak),
        v_leak=(MEMBRANE / CAPACITY * model.current).float().repeat_interleave(of_each),  # a constant current
        v_threshold=THRESHOLD,
        t_refractory=1e-3 * STEP * REFRACTORY,
        dt=1e-3 * STEP,
        reset="value",
        threshold_inclusive=True,
    )
    outside = Population("outside", sum(model.sizes))
    cells = Population("cells", sum(model.sizes), neuron)
    synapses = SparseProjection.fixed_total_number(
        model.sizes,
        model.counts,
        model.weight,
        model.delay,
        weight_spread=WEIGHT_SPREAD,
        delay_spread=DELAY_SPREAD,
        generator=torch.Generator().manual_seed(seed),
        later=1,
        population=cells,
    )
    return Network([outside, cells], [synapses, LayerProjection(outside, cells, nn.Identity())])


def simulate(model: Model, network: Network, seconds: float, seed: int) -> torch.Tensor:
    """Return the spikes [n, 2] of a run: step and neuron of each."""
    rates = model.outside.float().repeat_interleave(torch.tensor(model.sizes))
    outside = PoissonInput(len(rates), rates, model.outside_weight, dt=1e-3 * STEP, seed=seed)
    spikes, state = Recorder("cells", events=True), network.rest()
    _, voltage, _ = state.neurons["cells"]
    voltage.normal_(START, START_SPREAD, generator=torch.Generator().manual_seed(seed))
    steps, chunk = round(seconds * 1e3 / STEP), 1 << (_AT_ONCE // len(rates)).bit_length() - 1
    with torch.no_grad():
        network.run(outside, state, recorders=[spikes], steps=steps, chunk=chunk)
    return spikes.data[:, [0, 2]]


def statistics(spikes: torch.Tensor, sizes: list[int], seconds: float, skip: float) -> list[tuple[float, float]]:
    """Return each population's mean rate in spikes/s and mean CV of intervals, without the first ``skip`` s."""
    late = spikes[spikes[:, 0] >= skip * 1e3 / STEP]
    late = late[(late[:, 1] * (1 << 32) + late[:, 0]).argsort()]
    same = late[1:, 1] == late[:-1, 1]
    interval, neuron = late[:, 0].diff()[same].double(), late[1:, 1][same]
    number, total, squares = (
        torch.bincount(neuron, weights, sum(sizes)) for weights in (torch.ones_like(interval), interval, interval**2)
    )
    mean = total / number
    variation = (squares / number - mean**2).clamp(min=0).sqrt() / mean
    variation[number < 3] = torch.nan  # too few intervals  # noqa: PLR2004
    counts = torch.bincount(late[:, 1], minlength=sum(sizes)).double() / (seconds - skip)
    parts = zip(counts.split(sizes), variation.split(sizes), strict=True)
    return [(float(rate.mean()), float(item.nanmean())) for rate, item in parts]


def draw_picture(spikes: torch.Tensor, model: Model, found: list[tuple[float, float]], path: Path) -> None:
    """Draw a raster of the last 200 ms and the mean rates next to those at full size."""
    import matplotlib as mpl  # noqa: PLC0415  # an extra, needed for the picture alone

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (raster, bars) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    last = spikes[spikes[:, 0] > spikes[-1, 0] - 2000]
    edges = torch.tensor([0, *model.sizes]).cumsum(0)
    for index, name in enumerate(NAMES):
        mine = last[(last[:, 1] >= edges[index]) & (last[:, 1] < edges[index + 1])]
        raster.plot(
            mine[:, 0].numpy() * STEP, mine[:, 1].numpy(), ",", color=f"C{index // 2}" if index % 2 == 0 else "black"
        )
        raster.text(-0.01, float(edges[index : index + 2].float().mean()), name, ha="right", va="center",
                    transform=raster.get_yaxis_transform())  # fmt: skip
    raster.set(xlabel="ms", yticks=[], title="spikes")
    raster.invert_yaxis()
    place = torch.arange(len(NAMES)).numpy()
    bars.barh(place - 0.2, [rate for rate, _ in found], 0.4, label="this run")
    bars.barh(place + 0.2, RATES.numpy(), 0.4, label="full size (NEST's parameters)")
    bars.set(yticks=place, yticklabels=NAMES, xlabel="spikes/s", title="mean rates")
    bars.invert_yaxis()
    bars.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the circuit and print its rates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=0.1, help="share of neurons and of in-degrees")
    parser.add_argument("--seconds", type=float, default=2.0, help="of the model's time; the first 0.5 are not counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    model = scaled(asked.scale)
    network = build(model, asked.seed)
    synapses = network.projections["cells->cells"]
    print(f"{sum(model.sizes)} neurons, {synapses.synapses} synapses of {synapses.bytes_per_synapse:.2f} bytes")
    start = time.perf_counter()
    spikes = simulate(model, network, asked.seconds, asked.seed)
    took = time.perf_counter() - start
    found = statistics(spikes, model.sizes, asked.seconds, 0.5)
    for name, (rate, variation), full in zip(NAMES, found, RATES, strict=True):
        print(f"{name:<6} {rate:6.2f} spikes/s (full size {float(full):5.2f})   CV of intervals {variation:.2f}")
    reasons = "; ".join(network.record.reasons)
    print(f"run by {network.record.backend or f'torch: {reasons}'}, {took / asked.seconds:.1f} × real time")
    if asked.picture is not None:
        draw_picture(spikes, model, found, asked.picture)


if __name__ == "__main__":
    main()
