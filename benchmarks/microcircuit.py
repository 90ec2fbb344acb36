"""The cortical microcircuit compared with NEST: rates, irregularity, synaptic events/s and bytes per synapse.

Both get the same parameters, and networks and inputs of their own seeds; several seeds show how far runs of one program
lie apart. NEST runs in the Python that ``--nest`` names (pip install nest-simulator); without it, only q4-snn is
measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import runpy
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import record

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
SKIP_S = 0.5


def _facts(circuit: dict[str, Any], model: Any, seconds: float, seed: int) -> dict[str, Any]:
    """Return the parameters as NEST's script takes them."""
    names: tuple[str, ...] = (
        "STEP",
        "MEMBRANE",
        "SYNAPSE",
        "CAPACITY",
        "REFRACTORY",
        "THRESHOLD",
        "START",
        "START_SPREAD",
    )
    names += ("WEIGHT_SPREAD", "DELAY_SPREAD")
    lists = {name: item.tolist() if isinstance(item, torch.Tensor) else item for name, item in model._asdict().items()}
    return lists | {name.lower(): circuit[name] for name in names} | {"seconds": seconds, "seed": seed}


def _run_q4(circuit: dict[str, Any], model: Any, seconds: float, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    synapses = circuit["join"](model, seed)
    start = time.perf_counter()
    spikes = circuit["simulate"](model, synapses, seconds, seed)
    return spikes, {"seconds": time.perf_counter() - start, "bytes_per_synapse": synapses.bytes_per_synapse}


def _run_nest(python: str, facts: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    script = Path(__file__).parent / "nest_microcircuit.py"
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "facts.json"), Path(folder, "spikes.npy")
        given.write_text(json.dumps(facts), encoding="utf-8")
        command = [python, str(script), str(given), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  # no input
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return torch.from_numpy(np.load(out)), result


def main(options: Sequence[str] = ()) -> None:
    """Measure, write ``microcircuit.json`` and print rates and irregularity."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks microcircuit")
    parser.add_argument("--scale", type=float, default=0.1, help="Share of neurons and in-degrees.")
    parser.add_argument("--seconds", type=float, default=5.0, help="Of the model's time, in each run.")
    parser.add_argument("--seeds", type=int, default=3, help="Runs of each program.")
    parser.add_argument("--nest", help="A Python that has NEST.")
    parser.add_argument("--quick", action="store_true", help="A hundredth for one and a half seconds, once.")
    asked = parser.parse_args(options)
    if asked.quick:
        asked.scale, asked.seconds, asked.seeds = 0.01, 1.5, 1
    circuit = runpy.run_path(str(ROOT / "examples" / "microcircuit.py"))
    model = circuit["scaled"](asked.scale)
    sizes = torch.tensor(model.sizes)
    fan_out = (model.counts.sum(0) / sizes).repeat_interleave(sizes)  # a source's mean number of synapses
    runs: dict[str, list[dict[str, Any]]] = {"q4": [], **({"nest": []} if asked.nest else {})}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed, (name, results) in itertools.product(range(1, asked.seeds + 1), runs.items()):
            if name == "q4":
                spikes, result = _run_q4(circuit, model, asked.seconds, seed)
            else:
                spikes, result = _run_nest(asked.nest, _facts(circuit, model, asked.seconds, seed))
            found = circuit["statistics"](spikes, model.sizes, asked.seconds, SKIP_S)
            result |= {"seed": seed, "rates": [round(item[0], 4) for item in found]}
            result |= {"cv": [round(item[1], 4) for item in found]}
            result["events_per_s"] = float(fan_out[spikes[:, 1]].sum()) / result["seconds"]
            results.append(result)
            print(
                name, f"seed {seed}: {result['events_per_s']:.3g} events/s", result["rates"], result["cv"], flush=True
            )
    finally:
        torch.set_num_threads(threads)
    facts = {"scale": asked.scale, "model_seconds": asked.seconds, "skipped_s": SKIP_S, "threads": 1}
    facts |= {"neurons": sum(model.sizes), "synapses": int(model.counts.sum()), "populations": circuit["NAMES"]}
    facts |= {"full_size_rates": [round(rate, 3) for rate in circuit["RATES"].tolist()]}
    is_whole = asked.nest is not None and asked.seeds > 2 and asked.seconds >= 5  # noqa: PLR2004
    path = record.write("microcircuit", {**facts, "runs": runs}, folder=record.RESULTS if is_whole else record.BUILD)
    print(f"written: {path}")
