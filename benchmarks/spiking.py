"""A layer of spiking neurons with 4-bit synapses, beside snnTorch's with float32 ones, over how often inputs fire.

Both run the same spikes through 2,048 × 2,048 synapses into LIF neurons, sample by sample, in turns on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record
from q4_nn import pack_
from q4_snn import LIF, Network, Population, Projection, spikegen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RATES = (0.01, 0.03, 0.1, 0.3)
STEPS, BETA = 20, 0.9


def _ours(weight: torch.Tensor, session: q4.Session) -> tuple[Network, q4.Q4Linear]:
    size = len(weight)
    pixels, cells = Population("pixels", size, spikes=True), Population("cells", size, LIF.from_beta(BETA))
    network = Network([pixels, cells], [Projection(pixels, cells, format="nf4")])
    network.get_parameter("projections.pixels->cells.synapses.weight").data.copy_(weight)
    pack_(network, session)
    layer = network.get_submodule("projections.pixels->cells.synapses")
    assert isinstance(layer, q4.Q4Linear)
    return network, layer


def _theirs(weight: torch.Tensor) -> Callable[[torch.Tensor], object] | None:
    try:
        import snntorch  # noqa: PLC0415  # not everywhere
    except ImportError:
        print("snntorch is not installed: only q4-snn is measured")
        return None
    neuron = snntorch.Leaky(beta=BETA, reset_delay=False)

    def run(x: torch.Tensor) -> object:
        mem, spikes = torch.zeros(1, len(weight)), []
        for step in x:
            fired, mem = neuron(torch.nn.functional.linear(step, weight), mem)
            spikes.append(fired)
        return torch.stack(spikes)

    return run


def main(options: Sequence[str] = ()) -> None:
    """Measure, write ``snn.json`` and print the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks snn")
    parser.add_argument("--quick", action="store_true", help="a small layer and two rounds, for development")
    asked = parser.parse_args(options)
    size, rounds, repeats = (256, 2, 1) if asked.quick else (2048, 15, 1)
    torch.set_num_threads(1)
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.1
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        session = stack.enter_context(q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")))
        network, layer = _ours(weight, session)
        theirs = _theirs(weight)
        bytes_per_synapse = layer.diagnostics().prepared_bytes / size**2
        for rate in RATES:
            x = spikegen.rate(torch.full((1, size), rate), STEPS, generator=torch.Generator().manual_seed(1))
            calls: dict[str, Callable[[], object]] = {"q4_snn": lambda x=x: network(x)}  # type: ignore[misc]  # its own x
            if theirs is not None:
                calls["snntorch"] = lambda x=x: theirs(x)  # type: ignore[misc]  # as above
            events = float(x.sum()) * size
            for name, samples in record.interleaved_us(calls, rounds=rounds, repeats=repeats).items():
                seconds = statistics.median(samples) / 1e6
                row = {"rate": rate, "who": name, "us_per_step": record.summary([us / STEPS for us in samples])}
                rows.append(row | {"steps_per_s": STEPS / seconds, "synaptic_events_per_s": events / seconds})
                print(
                    f"{rate:5.0%} {name:9} {STEPS / seconds:9,.0f} steps/s {events / seconds:15,.0f} synaptic events/s"
                )
    print(f"{bytes_per_synapse:.3f} bytes per synapse; float32 has 4")
    if not asked.quick:
        result = {
            "size": size,
            "steps": STEPS,
            "batch": 1,
            "threads": 1,
            "bytes_per_synapse": bytes_per_synapse,
            "rows": rows,
        }
        print(f"wrote {record.write('snn', result)}")
