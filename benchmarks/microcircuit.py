"""The cortical microcircuit compared with NEST, and at full scale: speed, rates, irregularity and memory.

Both get the same parameters, and networks and inputs of their own seeds; several seeds show how far runs of one program
lie apart. Runs take turns, each in a process of its own, on one thread. NEST runs in the Python that ``--nest`` names
(pip install --group simulators); without it, only q4-snn is measured. ``--full`` adds one run of all 77,169 neurons.

``python -m benchmarks.microcircuit --child SCALE SECONDS SEED SPIKES.npy`` is such a run of q4-snn's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import record, verdict
from benchmarks.child import peak_bytes, run_child

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
SKIP_S, LIMIT_S = 0.5, 7200.0
FASTER, SAME_RATE, IN_RANGE, MOST_BYTES = 5.0, 0.05, 1.03, 1.2e9
PUBLISHED = {
    "Potjans and Diesmann 2014, in Romaro et al. 2021": (0.86, None, 4.45, None, 7.59, None, 1.09, None),
    "NetPyNE, Romaro et al. 2021, table A.1": (0.90, 2.80, 4.39, 5.70, 6.80, 8.22, 1.14, 7.60),
    "PyNEST 2016, network_params.py": (0.971, 2.868, 4.746, 5.396, 8.142, 9.078, 0.991, 7.523),
    "PyNEST 2020, network_params.py": (0.903, 2.965, 4.414, 5.876, 7.569, 8.633, 1.105, 7.829),
}
"""Mean rates at full scale in spikes/s, by the order of populations: each a run with a seed of its own. Runs of one
program at a tenth differ by 3 % between seeds."""
_SPEED = "a second of model time at least 5 times as fast as NEST's"
_RATES = "mean rates of populations within 5 % of NEST's"
_RANGE = "mean rates at full scale within the range of published ones, or 3 % off"
_MEMORY = "the full scale in less than 1.2 GB, built and run, beyond imports"


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


def _circuit() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "microcircuit.py"))


def _run(circuit: dict[str, Any], scale: float, seconds: float, seed: int, nest: str | None) -> dict[str, Any]:
    """Run a seed in a process of its own: q4-snn, or NEST in a Python; return its facts, rates and CVs."""
    model = circuit["scaled"](scale)
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "facts.json"), Path(folder, "spikes.npy")
        if nest is None:
            result = run_child("benchmarks.microcircuit", scale, seconds, seed, out, limit_s=LIMIT_S)
        else:
            given.write_text(json.dumps(_facts(circuit, model, seconds, seed)), encoding="utf-8")
            result = run_child("benchmarks.nest_microcircuit", given, out, limit_s=LIMIT_S, python=nest)
        spikes = torch.from_numpy(np.load(out))
    sizes = torch.tensor(model.sizes)
    fan_out = (model.counts.sum(0) / sizes).repeat_interleave(sizes)  # a source's mean number of synapses
    found = circuit["statistics"](spikes, model.sizes, seconds, min(SKIP_S, seconds / 2))
    result |= {"seed": seed, "seconds_per_model_second": result["seconds"] / seconds, "spikes": len(spikes)}
    result |= {"rates": [round(item[0], 4) for item in found], "cv": [round(item[1], 4) for item in found]}
    result["events_per_s"] = float(fan_out[spikes[:, 1]].sum()) / result["seconds"]
    speed = f"{result['seconds_per_model_second']:.2f} × real time, {result['events_per_s']:.3g} events/s"
    print(
        f"{'q4' if nest is None else 'nest'} at {scale:g}, seed {seed}: {speed}",
        result["rates"],
        result["cv"],
        flush=True,
    )
    return result


def _compared(runs: dict[str, list[dict[str, Any]]]) -> list[verdict.Verdict]:
    """Return how q4-snn's runs compare with NEST's."""
    lead = worst = None
    if runs.get("nest"):
        pairs = zip(runs["q4"], runs["nest"], strict=True)
        lead = statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)
        ours, theirs = (np.mean([run["rates"] for run in runs[name]], 0) for name in ("q4", "nest"))
        worst = float(abs(ours / theirs - 1).max())
    return [
        verdict.Verdict(_SPEED, "median of seeds", lead, FASTER, against="NEST"),
        verdict.Verdict(_RATES, "means of seeds", worst, SAME_RATE, is_most=True, against="NEST"),
    ]


def _judged(full: dict[str, Any] | None) -> list[verdict.Verdict]:
    """Return how the full scale compares with what is published of it."""
    outside = held = None
    if full is not None:
        held = (full["peak_bytes"] - full["imported_bytes"]) / MOST_BYTES
        published = [[rate for rate in rates if rate] for rates in zip(*PUBLISHED.values(), strict=True)]
        pairs = zip(full["rates"], published, strict=True)
        outside = max(max(rate / max(known), min(known) / rate) for rate, known in pairs)
    return [
        verdict.Verdict(_RANGE, "times the range's end, at most", outside, IN_RANGE, is_most=True, against="published"),
        verdict.Verdict(_MEMORY, "growth of the process, of 1.2 GB", held, 1.0, is_most=True, against="1.2 GB"),
    ]


def main(options: Sequence[str] = ()) -> None:
    """Measure, write ``microcircuit.json`` and print speed, rates, irregularity and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks microcircuit")
    parser.add_argument("--scale", type=float, default=0.1, help="Share of neurons and in-degrees.")
    parser.add_argument("--seconds", type=float, default=5.0, help="Of the model's time, in each run.")
    parser.add_argument("--seeds", type=int, default=3, help="Runs of each program.")
    parser.add_argument("--nest", help="A Python that has NEST.")
    parser.add_argument("--full", action="store_true", help="Also run the full scale once, in q4-snn.")
    parser.add_argument("--quick", action="store_true", help="A hundredth for one and a half seconds, once.")
    asked = parser.parse_args(options)
    if asked.quick:
        asked.scale, asked.seconds, asked.seeds = 0.01, 1.5, 1
    circuit = _circuit()
    model = circuit["scaled"](asked.scale)
    runs: dict[str, list[dict[str, Any]]] = {"q4": [], **({"nest": []} if asked.nest else {})}
    for seed, name in itertools.product(range(1, asked.seeds + 1), runs):
        nest = asked.nest if name == "nest" else None
        runs[name].append(_run(circuit, asked.scale, asked.seconds, seed, nest))
    full = _run(circuit, 1.0, asked.seconds, 1, None) if asked.full else None
    verdicts = _compared(runs) + _judged(full)
    print(*verdict.lines(verdicts), sep="\n")
    facts = {"scale": asked.scale, "model_seconds": asked.seconds, "skipped_s": SKIP_S, "threads": 1}
    facts |= {"neurons": sum(model.sizes), "synapses": int(model.counts.sum()), "populations": circuit["NAMES"]}
    facts |= {"published_rates": {name: [*rates] for name, rates in PUBLISHED.items()}}
    facts |= {"verdicts": [item.to_json() for item in verdicts], "runs": runs, "full": full}
    is_whole = asked.nest is not None and asked.full and asked.seeds > 2 and asked.seconds >= 5  # noqa: PLR2004
    path = record.write(record.of_isa("microcircuit"), facts, folder=record.RESULTS if is_whole else record.BUILD)
    print(f"written: {path}")


def _child(scale: float, seconds: float, seed: int, out: str) -> None:
    """Run a circuit in this process, write its spikes, and print times, bytes and who ran it."""
    torch.set_num_threads(1)
    circuit, imported = _circuit(), peak_bytes()
    model, start = circuit["scaled"](scale), time.perf_counter()
    network = circuit["build"](model, seed)
    built, busy = time.perf_counter(), time.process_time()
    spikes = circuit["simulate"](model, network, seconds, seed)
    took, busy = time.perf_counter() - built, time.process_time() - busy
    np.save(out, spikes.numpy())
    synapses = network.projections["cells->cells"]
    facts = {"seconds": took, "cpu_s": busy, "build_s": built - start, "backend": network.record.backend}
    facts |= {"reasons": [*network.record.reasons], "neurons": sum(model.sizes), "synapses": synapses.synapses}
    facts |= {"bytes_per_synapse": synapses.bytes_per_synapse}
    facts |= {"imported_bytes": imported, "peak_bytes": peak_bytes()}
    print(json.dumps(facts))


if __name__ == "__main__":
    _, _, *words = sys.argv
    _child(float(words[0]), float(words[1]), int(words[2]), words[3])
