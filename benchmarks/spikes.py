"""Products with spikes: cpu-native's sparse and dense ones in NF4, and the float32 ``nn.Linear`` of torch-based peers.

snnTorch, Norse and SpikingJelly multiply spikes by ``nn.Linear``, at every rate; that is what is timed for them.
A synaptic event is one spike that reaches one out-feature. One thread; all ways take turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record
from q4_snn.products import SpikeProduct
from q4core.extension import LayerHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = (512, 1024, 2048)
ROWS = (1, 8, 32)
RATES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
PEER_RATES = (0.02, 0.05)
ROUNDS = 9


def _measure(layer: q4.Q4Linear, peer: torch.nn.Linear, rows: int, rate: float, rounds: int) -> dict[str, Any]:
    """Return the medians of one case, in microseconds, and each ratio's median over the rounds."""
    random, size, product = torch.Generator().manual_seed(7), layer.in_features, SpikeProduct(layer)
    sparse_calls = product.record.sparse
    x = (torch.rand((rows, size), generator=random) < rate).float()
    ones = x.bool()
    handle = LayerHandle(layer)  # the sparse product itself, at every rate
    backend: Any = handle.backend
    out = torch.empty(rows, size)

    def sparse() -> None:
        backend.spikes(handle.prepared, ones, out, bias=None)

    calls = {"sparse": sparse, "dense": lambda: layer(x), "float32": lambda: peer(x), "product": lambda: product(x)}
    with torch.no_grad():
        repeats = max(1, int(2e8 / (rows * size * size * 8)))
        samples = record.interleaved_us(calls, rounds=rounds, repeats=min(repeats, 20))
    spikes = int(ones.sum())
    ratios = {
        f"{slow}_over_{fast}": statistics.median(a / b for a, b in zip(samples[slow], samples[fast], strict=True))
        for slow, fast in (("dense", "sparse"), ("float32", "sparse"), ("float32", "product"))
    }
    medians = {f"{name}_us": statistics.median(values) for name, values in samples.items()}
    events = {f"{name}_events_per_s": spikes * size / medians[f"{name}_us"] * 1e6 for name in ("product", "float32")}
    ran = "sparse" if product.record.sparse > sparse_calls else "dense"
    return {"size": size, "rows": rows, "rate": rate, "ran": ran, **medians, **ratios, **events}


def main(options: Sequence[str] = ()) -> None:
    """Measure, write ``spikes.json`` and print ratios and where sparse and dense take as long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks spikes")
    parser.add_argument("--quick", action="store_true", help="One size and few rounds, for development.")
    asked = parser.parse_args(options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = q4.SessionConfig(device="cpu", backend="cpu-native", activation_precision="exact")
    cases: list[dict[str, Any]] = []
    try:
        for size in SIZES[1:2] if asked.quick else SIZES:
            weight = q4.quantize(torch.randn(size, size, generator=torch.Generator().manual_seed(size)), "nf4")
            layer, peer = q4.Q4Linear(weight, config=config), torch.nn.Linear(size, size, bias=False)
            for rows in ROWS:
                for rate in RATES:
                    cases.append(_measure(layer, peer, rows, rate, 3 if asked.quick else ROUNDS))
                    case = cases[-1]
                    times = " ".join(f"{name} {case[f'{name}_us']:.0f}" for name in ("sparse", "dense", "float32"))
                    ratio = f"{case['dense_over_sparse']:.2f}, {case['float32_over_product']:.1f}"
                    print(
                        f"{size} × {size}, {rows:2} rows, {rate:.2f}: {times} µs; {ratio} × ({case['ran']})", flush=True
                    )
    finally:
        torch.set_num_threads(threads)
    crossover = {
        f"{size}x{rows}": max((c["rate"] for c in cases if (c["size"], c["rows"]) == (size, rows)
                               and c["dense_over_sparse"] >= 1), default=0.0)
        for size in SIZES for rows in ROWS
    }  # fmt: skip
    least = min(case["float32_over_product"] for case in cases if case["rate"] in PEER_RATES)
    print(f"least lead over float32 at {PEER_RATES}: {least:.2f} ×; sparse is as fast up to {crossover}")
    facts = {"threads": 1, "format": "nf4", "isa": q4.default_registry().backends()["cpu-native"].isa}  # type: ignore[attr-defined]
    folder = record.BUILD if asked.quick else record.RESULTS
    result = {**facts, "least_lead_over_float32": least, "sparse_up_to": crossover, "cases": cases}
    print(f"written: {record.write('spikes', result, folder=folder)}")
