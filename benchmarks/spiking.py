"""Spiking networks with 4-bit synapses compared with other simulators: speed, spikes, and memory per synapse.

A layer of 2,048 × 2,048 synapses, at several input rates, in turns with the torch-based libraries within one process,
and then in Brian2 and NEST. And a recurrent circuit with a tenth of its synapses, in which q4-snn's sparse ones are
compared with Brian2's and NEST's. All get the same weights, inputs and neurons, on one thread and for one sample. A
simulator whose spikes are others is not timed. Memory is what synapses add to a process of their own. The last row is
q4-snn's alone: 100,000 steps of a small network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import record, spiking_circuit, spiking_long, spiking_picture, verdict
from benchmarks.child import run_child
from benchmarks.spiking_torch import BETA, OURS, SIMULATORS, layer_weight, rounded
from q4_snn import spikegen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.spiking_torch import Run

RATES = (0.01, 0.03, 0.1, 0.3)
TARGET = 3.0
BY_STEP = "synaptic events/s at least 3 times a torch-based library's, step by step"
AT_ONCE = "synaptic events/s at least 3 times a torch-based library's, all steps in one product"
LAYER_US = {0.01: 15.0, 0.03: 30.0, 0.1: 65.0, 0.3: 170.0}
"""Share of inputs that fire → the most that a step of the layer of 2,048 × 2,048 is to take."""
CIRCUITS = {2000: (5.0, {"Brian2": 3.0, "NEST": 8.0}), 6000: (18.0, {"Brian2": 2.5, "NEST": 15.0})}
"""Neurons → the most µs that a step is to take, and how many times as long simulators take."""
SAME_SHARE, SAME_RATE = 1e-4, 0.05
"""Sums are rounded in other orders. In a layer that may flip this share of all spikes, where a membrane just passes the
threshold; a circuit goes another way after that, and its rate may differ by this share."""
OTHERS = {"Brian2": "benchmarks.spiking_brian2", "NEST": "benchmarks.spiking_nest"}
LIMIT_S = 600.0


def _reason(error: BaseException) -> str:
    """Return the last line of an error."""
    return str(error).strip().splitlines()[-1]


def _makers(weight: torch.Tensor) -> tuple[dict[str, Run], dict[str, str], dict[str, str]]:
    """Return the runs of a layer, their versions, and why others are missing."""
    runs: dict[str, Run] = {}
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, (distribution, make) in SIMULATORS.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
            runs[name] = make(weight)
        except importlib.metadata.PackageNotFoundError:
            missing[name] = f"{distribution} is not installed"
        except ImportError as error:
            missing[name] = f"{distribution} can't be imported: {error}"
    return runs, versions, missing


def _speed(seconds: Sequence[float], steps: int, spikes: float, events: float) -> dict[str, Any]:
    """Return the speeds of a run, from its samples."""
    median = statistics.median(seconds)
    return {
        "us_per_step": record.summary([second / steps * 1e6 for second in seconds]),
        "steps_per_s": steps / median,
        "spikes_per_s": spikes / median,
        "synaptic_events_per_s": events / median,
    }


def _target(name: str) -> str:
    return AT_ONCE if "all steps" in name else BY_STEP


def _input(size: int, rate: float, steps: int) -> torch.Tensor:
    return spikegen.rate(torch.full((1, size), rate), steps, generator=torch.Generator().manual_seed(1))


def _layer(size: int, steps: int, rounds: int, missing: dict[str, str]) -> tuple[dict[str, Any], list[verdict.Verdict]]:
    """Measure the layer in the torch-based libraries, in turns."""
    runs, versions, absent = _makers(layer_weight(size))
    missing |= absent
    rows: list[dict[str, Any]] = []
    verdicts: list[verdict.Verdict] = []
    for rate in RATES:
        x = _input(size, rate, steps)
        wanted = runs[OURS](x)
        differ = {name: float((run(x) != wanted).float().mean()) for name, run in runs.items()}
        for name in [name for name, share in differ.items() if share > SAME_SHARE]:
            missing[name] = f"other spikes at {differ[name]:.2%} of places, at {rate:.0%}"
            del runs[name]
        calls: dict[str, Callable[[], object]] = {name: lambda run=run, x=x: run(x) for name, run in runs.items()}  # type: ignore[misc]  # its own
        samples = record.interleaved_us(calls, rounds=rounds, repeats=1)
        for name, us in samples.items():
            found = _speed([item / 1e6 for item in us], steps, float(wanted.sum()), float(x.sum()) * size)
            rows.append({"rate": rate, "who": name, "differing_share": differ[name], **found})
            _print_speed(f"{rate:5.0%}", name, found)
            if name != OURS:
                lead = statistics.median(their / own for their, own in zip(us, samples[OURS], strict=True))
                verdicts.append(verdict.Verdict(_target(name), f"{rate:.0%} of inputs", lead, TARGET, against=name))
    verdicts += [verdict.Verdict(_target(name), "every rate", None, TARGET, against=name) for name in missing]
    memory = {}
    for name in (name for name in runs if _target(name) == BY_STEP):
        held = run_child("benchmarks.spiking_torch", name, size, limit_s=LIMIT_S)["held_bytes"]
        memory[name] = held / size**2
    return {"versions": versions, "rows": rows, "bytes_per_synapse": memory}, verdicts


def _print_speed(where: str, name: str, found: Mapping[str, Any]) -> None:
    speeds = f"{found['steps_per_s']:9,.0f} steps/s {found['spikes_per_s']:11,.0f} spikes/s"
    print(f"{where:>13} {name:38} {speeds} {found['synaptic_events_per_s']:15,.0f} events/s", flush=True)


def _elsewhere(module: str, problem: Mapping[str, Any], python: str) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """Run a problem in a process of its own; return spikes [n, 2], sorted, and the facts that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "problem.npz"), Path(folder, "spikes.npy")
        np.savez(given, **problem)
        facts = run_child(module, given, out, limit_s=LIMIT_S, python=python)
        spikes = np.load(out)
    return spikes[np.lexsort((spikes[:, 1], spikes[:, 0]))], facts


def _layer_elsewhere(size: int, steps: int, rounds: int, python: str, missing: dict[str, str]) -> dict[str, Any]:
    """Measure the layer in Brian2 and NEST: each rate's input, ``rounds`` times, one after the other."""
    inputs = torch.cat([_input(size, rate, steps) for rate in RATES for _ in range(rounds)])
    wanted = SIMULATORS[OURS][1](layer_weight(size))(inputs)[:, 0]
    source, target = np.divmod(np.arange(size**2, dtype=np.int64), size)
    problem: dict[str, Any] = {"source": source, "target": target}
    problem |= {"weight": rounded(layer_weight(size)).T.reshape(-1).numpy()}
    problem |= {"neurons": size, "beta": BETA, "inputs": inputs[:, 0].bool().numpy()}
    problem |= {"blocks": np.full(len(RATES) * rounds, steps)}
    rows: list[dict[str, Any]] = []
    memory: dict[str, float] = {}
    versions: dict[str, str] = {}
    for name, module in OTHERS.items():
        try:
            spikes, facts = _elsewhere(module, problem, python)
        except (OSError, SystemExit, subprocess.TimeoutExpired) as error:
            missing[name] = _reason(error)
            continue
        found = torch.zeros_like(wanted)
        found[spikes[:, 0], spikes[:, 1]] = 1
        differ = float((found != wanted).float().mean())
        if differ > SAME_SHARE:
            missing[name] = f"other spikes at {differ:.2%} of places"
            continue
        versions[name], memory[name] = (
            f"{facts['version']} {facts.get('code', '')}".strip(),
            facts["held_bytes"] / size**2,
        )
        for index, rate in enumerate(RATES):
            block = slice(index * rounds * steps, (index + 1) * rounds * steps)
            events = float(inputs[block].sum()) * size / rounds
            taken = facts["block_s"][index * rounds : (index + 1) * rounds]
            row = _speed(taken, steps, float(wanted[block].sum()) / rounds, events)
            rows.append({"rate": rate, "who": name, "differing_share": differ, **row})
            _print_speed(f"{rate:5.0%}", name, row)
    return {"versions": versions, "rows": rows, "bytes_per_synapse": memory}


def _circuit(neurons: int, blocks: Sequence[int], python: str, missing: dict[str, str]) -> dict[str, Any]:
    """Measure a circuit in q4-snn, Brian2 and NEST, each in a process of its own."""
    problem = spiking_circuit.problem(neurons, blocks)
    fan_out, synapses = np.bincount(problem["source"], minlength=neurons), len(problem["weight"])
    steps, seconds = sum(blocks), sum(blocks) * spiking_circuit.STEP_S
    found: dict[str, Any] = {}
    first: np.ndarray[Any, Any] | None = None
    for name, module in {OURS: "benchmarks.spiking_circuit", **OTHERS}.items():
        try:
            spikes, facts = _elsewhere(module, problem, sys.executable if name == OURS else python)
        except (OSError, SystemExit, subprocess.TimeoutExpired) as error:
            if name == OURS:
                raise
            missing[f"{name}, {neurons} neurons"] = _reason(error)
            continue
        first = spikes if first is None else first
        apart = abs(len(spikes) / len(first) - 1)
        if apart > SAME_RATE:
            missing[f"{name}, {neurons} neurons"] = f"its rate is {apart:.1%} off"
            continue
        common = min(len(first), len(spikes))
        differ = (first[:common] != spikes[:common]).any(1).nonzero()[0]
        counts = np.histogram(spikes[:, 0], bins=np.cumsum([0, *blocks]))[0]
        taken, events = facts["block_s"], float(fan_out[spikes[:, 1]].sum())
        row = {"rate_hz": len(spikes) / neurons / seconds, "spikes_per_block": counts.tolist()}
        row["same_until_step"] = int(first[differ[0], 0]) if len(differ) else steps
        row["us_per_step"] = record.summary([item / count * 1e6 for item, count in zip(taken, blocks, strict=True)])
        row |= {"steps_per_s": steps / sum(taken), "spikes_per_s": len(spikes) / sum(taken)}
        row |= {"synaptic_events_per_s": events / sum(taken), "seconds_per_model_second": sum(taken) / seconds}
        row["bytes_per_synapse"] = facts["held_bytes"] / synapses
        found[name] = row
        _print_speed(f"{neurons} neurons", name, row)
        print(
            f"{'':13} {row['seconds_per_model_second']:.1f} × real time, {row['bytes_per_synapse']:.1f} bytes/synapse"
        )
    return {"neurons": neurons, "synapses": synapses, "step_s": spiking_circuit.STEP_S, "runs": found}


def _judged(layer: Mapping[str, Any], circuits: Sequence[Mapping[str, Any]]) -> list[verdict.Verdict]:
    """Compare the time of a step with what it is to take, and with other simulators'."""
    target, found = "µs a step of the layer, median", []
    for rate, most in LAYER_US.items():
        own = next(row["us_per_step"]["median"] for row in layer["rows"] if (row["who"], row["rate"]) == (OURS, rate))
        found.append(verdict.Verdict(target, f"{rate:.0%} of inputs", own, most, is_most=True))
    for circuit in circuits:
        runs, subject = circuit["runs"], f"{circuit['neurons']:,} neurons"
        most, leads = CIRCUITS[circuit["neurons"]]
        own = runs[OURS]["us_per_step"]["median"]
        found.append(verdict.Verdict("µs a step of the circuit, median", subject, own, most, is_most=True))
        for name, least in leads.items():
            lead = runs[name]["us_per_step"]["median"] / own if name in runs else None
            target = f"the circuit at least {least:g} times as fast as {name}"
            found.append(verdict.Verdict(target, subject, lead, least, against=name))
    return found


def main(options: Sequence[str] = ()) -> None:
    """Measure, write ``snn.json`` and its picture, and print speeds and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks snn", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small networks and few rounds, for development")
    default = os.environ.get("Q4_SIMULATORS", sys.executable)
    parser.add_argument("--simulators", default=default, help="a Python that has NEST and Brian2; else $Q4_SIMULATORS")
    asked = parser.parse_args(options)
    size, steps, rounds, others = (256, 20, 2, 2) if asked.quick else (2048, 100, 15, 3)
    circuits = {500: [100] * 2} if asked.quick else {2000: [1000] * 10, 6000: [1000] * 10}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    missing: dict[str, str] = {}
    try:
        with torch.no_grad():
            layer, verdicts = _layer(size, steps, rounds, missing)
            for name, part in _layer_elsewhere(size, steps, others, asked.simulators, missing).items():
                layer[name] = layer[name] + part if isinstance(part, list) else layer[name] | part
            measured = [_circuit(*item, asked.simulators, missing) for item in circuits.items()]
    finally:
        torch.set_num_threads(threads)
    long_run, found = spiking_long.measure(2000 if asked.quick else 100_000)
    verdicts += found if asked.quick else [*found, *_judged(layer, measured)]
    for name, held in layer["bytes_per_synapse"].items():
        print(f"{held:6.2f} bytes per synapse of the layer, {name} {layer['versions'][name]}")
    for name, why in missing.items():
        print(f"not measured: {name}: {why}")
    print(*verdict.lines(verdicts), sep="\n")
    result: dict[str, Any] = {"threads": 1, "batch": 1, "size": size, "steps": steps, "missing": missing}
    result |= {"verdicts": [item.to_json() for item in verdicts], "layer": layer, "circuits": measured}
    result["long_run"] = long_run
    path = record.write(record.of_isa("snn"), result, folder=record.BUILD if asked.quick else record.RESULTS)
    picture = spiking_picture.draw(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png"))
    print(f"written: {path}, {picture}")
