"""A long run of a small network: 100,000 steps from a source into a file, and the memory that they take.

``python -m benchmarks.spiking_long --child STEPS`` prints its facts; a tenth of the steps runs first.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.child import peak_bytes, run_child
from benchmarks.verdict import Verdict
from q4_snn import LIF, Network, Poisson, Population, Recorder, SparseProjection, connectors

if TYPE_CHECKING:
    from q4_snn import NetworkState

__all__ = ["measure"]

MOST_S, MOST_MB = 10.0, 10.0
_SOURCES, _CELLS, _STEP_S = 100, 400, 1e-4


def _network() -> Network:
    """Return sources that excite cells, which inhibit each other."""
    draw = torch.Generator().manual_seed(0)
    noise, cells = Population("noise", _SOURCES, spikes=True), Population("cells", _CELLS, LIF(20e-3, dt=_STEP_S))
    into = connectors.fixed_in_degree(noise, cells, 20, generator=draw)
    among = connectors.bernoulli(cells, cells, 0.05, generator=draw, autapses=False)
    exciting = SparseProjection(*into, 0.4, 1, sources=noise, targets=cells)
    return Network([noise, cells], [exciting, SparseProjection(*among, -0.1, 15, sources=cells, targets=cells)])


def measure(steps: int) -> tuple[dict[str, Any], list[Verdict]]:
    """Run some steps in a process of its own; return its facts, and whether it is fast and its memory flat."""
    found = run_child("benchmarks.spiking_long", steps, limit_s=600.0)
    growth = found["grown_bytes"] / 1e6
    print(f"{steps} steps of a small network: {found['seconds']:.2f} s, and {growth:.1f} MB more at the peak")
    subject, fast = f"{found['synapses']} synapses", f"{steps:,} steps of a small network in less than 10 s"
    flat = "memory flat over them: at most 10 MB more"
    return found, [
        Verdict(fast, subject, found["seconds"], MOST_S, is_most=True),
        Verdict(flat, subject, growth, MOST_MB, is_most=True),
    ]


def _child(steps: int) -> None:
    torch.set_num_threads(1)
    network, feed = _network(), Poisson(_SOURCES, 30.0, dt=_STEP_S, seed=1)

    def run(count: int, state: NetworkState | None, folder: str) -> tuple[NetworkState | None, int]:
        with torch.no_grad(), Recorder("cells", events=True, file=Path(folder, "spikes.npy")) as spikes:
            state = network.run(feed, state, recorders=[spikes], steps=count, chunk=1024)
        return state, spikes.rows

    with tempfile.TemporaryDirectory() as folder:
        state, _ = run(steps // 10, None, folder)
        before, start, busy = peak_bytes(), time.perf_counter(), time.process_time()
        _, rows = run(steps, state, folder)
    facts: dict[str, Any] = {"steps": steps, "seconds": time.perf_counter() - start}
    facts |= {"cpu_s": time.process_time() - busy, "grown_bytes": peak_bytes() - before, "spikes": rows}
    facts |= {"neurons": _CELLS, "backend": network.record.backend}
    facts["synapses"] = sum(
        item.synapses for item in network.projections.values() if isinstance(item, SparseProjection)
    )
    print(json.dumps(facts))


if __name__ == "__main__":
    _child(int(sys.argv[2]))
