"""A neuron finds out which of its inputs fire together: its 4-bit synapses learn by STDP while others read them.

    python examples/snn_stdp.py [--seconds 6] [--format nf4] [--picture stdp.png]

Of 256 inputs, half fire together now and then, half by themselves, all at one mean rate. The learner writes new
codes into a mutable tensor; a reader takes each version whole and computes with it.

It needs q4-snn, q4-actors and matplotlib: pip install "q4core[examples]"
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import attrs
import matplotlib as mpl

mpl.use("Agg")

import torch
from matplotlib import pyplot as plt

import q4core as q4
from q4_actors import MutableTensor
from q4_snn import LIF, STDP

INPUTS, RATE, BURSTS, STEPS = 256, 0.02, 0.1, 1000  # spikes and bursts in a step of 1 ms; steps of a second
TOGETHER = slice(0, INPUTS // 2)


def events(steps: int, generator: torch.Generator) -> torch.Tensor:
    """Return spikes [T, 256]: the first half's rates rise and fall together, the others' stay."""
    rates = torch.full((steps, INPUTS), RATE)
    rates[:, TOGETHER] = torch.where(torch.rand(steps, 1, generator=generator) < BURSTS, 6 * RATE, RATE * 4 / 9)
    return torch.bernoulli(rates, generator=generator)


def read(codes: MutableTensor, weight: q4.PackedWeight, last: int, means: list[tuple[float, float]]) -> None:
    """Read each version, and record how strong the synapses of both halves are."""
    for version in range(1, last + 1):
        codes.wait(version)
        with codes.read() as seen:
            dense = q4.dequantize(attrs.evolve(weight, qdata=seen.tensor))
        means.append((float(dense[:, TOGETHER].mean()), float(dense[:, INPUTS // 2 :].mean())))
        print(f"{version / 2:4.1f} s {means[-1][0]:+.3f} together, {means[-1][1]:+.3f} apart", flush=True)


def draw(means: list[tuple[float, float]], before: torch.Tensor, after: torch.Tensor, path: Path) -> None:
    """Draw the means over time, and all weights [256] before and after."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name, values, colour in zip(
        ("together", "apart"), zip(*means, strict=True), ("#3465a4", "#c17d11"), strict=True
    ):
        left.plot([(index + 1) / 2 for index in range(len(values))], values, label=name, color=colour)
    left.set(xlabel="seconds", ylabel="mean weight", title="inputs that fire")
    left.legend()
    right.plot(before, ".", color="#babdb6", label="before")
    right.plot(after, ".", color="#3465a4", label="after")
    right.axvline(INPUTS / 2, color="#2e3436", lw=0.8, ls=":")
    right.set(xlabel="input", ylabel="weight", title="every weight is one of 16 levels of its block")
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Learn, read, draw, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--picture", type=Path, default=Path("stdp.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = q4.quantize(torch.rand(1, INPUTS, generator=generator), options.format)
    rule = STDP(weight, a_plus=0.02, a_minus=0.01, tau_plus=5e-3, tau_minus=20e-3)
    neuron, mem = LIF(10e-3, dt=1e-3, v_threshold=12.0), None
    means: list[tuple[float, float]] = []
    with MutableTensor(weight.qdata, name="codes") as codes:
        reader = threading.Thread(target=read, args=(codes, weight, 2 * options.seconds, means))
        reader.start()
        for part in events(options.seconds * STEPS, generator).split(STEPS // 2):
            dense = q4.dequantize(rule.weight)
            for spikes in part:
                fired, mem = neuron(spikes[None] @ dense.T, mem)
                rule.step(spikes[None], fired)
            codes.replace(rule.weight.qdata, wait=True)
        reader.join()
    draw(means, q4.dequantize(weight)[0], q4.dequantize(rule.weight)[0], options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
