"""Write ``stdp.json``: by how much NEST and Brian2 change a synapse for given spikes, for tests without them.

Nothing here imports q4core. Run it in an environment that has both (``pip install --group simulators``)::

    python plugins/snn/tests/golden/make_stdp.py

Spikes are at whole ms; those of sources at even, those of targets at odd ones, so that no pair is at the same time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import brian2
import nest
import numpy as np

FILE = Path(__file__).with_name("stdp.json")
PAIR = {"a_plus": 0.011, "a_minus": 0.007, "tau_plus": 16.8, "tau_minus": 33.7}
TRIPLET = {**PAIR, "a3_plus": 0.0065, "a3_minus": 0.0023, "tau_x": 101.0, "tau_y": 125.0}
START = 50.0
DELAY = 1.0


def trains(seed: int) -> tuple[list[float], list[float]]:
    """Return the times of a source, the last one late, and of a target, in ms."""
    random = np.random.default_rng(seed)
    pre = np.sort(random.choice(np.arange(10, 400, 2), 25, replace=False))
    post = np.sort(random.choice(np.arange(11, 400, 2), 25, replace=False))
    return [*map(float, pre), 420.0], [*map(float, post)]


def with_nest(rule: dict[str, float], pre: list[float], post: list[float]) -> float:
    """Return the change of a weight; spikes of the target reach the synapse after its delay, so they come before."""
    nest.ResetKernel()
    nest.resolution = 1.0
    is_triplet = "tau_x" in rule
    source = nest.Create("parrot_neuron")
    facts = {"tau_minus": rule["tau_minus"]} | ({"tau_minus_triplet": rule["tau_y"]} if is_triplet else {})
    target = nest.Create("parrot_neuron", params=facts)
    for neuron, times in ((source, pre), (target, [time - DELAY for time in post])):
        generator = nest.Create("spike_generator", params={"spike_times": [time - 1.0 for time in times]})
        nest.Connect(generator, neuron, syn_spec={"delay": 1.0})
    spec: dict[str, Any] = {"weight": START, "delay": DELAY, "receptor_type": 1, "Wmax": 100.0}
    if is_triplet:
        spec |= {
            "synapse_model": "stdp_triplet_synapse",
            "tau_plus": rule["tau_plus"],
            "tau_plus_triplet": rule["tau_x"],
        }
        spec |= {"Aplus": rule["a_plus"], "Aplus_triplet": rule["a3_plus"]}
        spec |= {"Aminus": rule["a_minus"], "Aminus_triplet": rule["a3_minus"]}
    else:
        spec |= {"synapse_model": "stdp_synapse", "tau_plus": rule["tau_plus"], "mu_plus": 0.0, "mu_minus": 0.0}
        spec |= {"lambda": rule["a_plus"] / 100.0, "alpha": rule["a_minus"] / rule["a_plus"]}
    nest.Connect(source, target, syn_spec=spec)
    nest.Simulate(440.0)
    return float(nest.GetConnections(source, target).get("weight")) - START


def with_brian(rule: dict[str, float], pre: list[float], post: list[float]) -> float:
    """Return the change of a weight."""
    brian2.start_scope()
    brian2.prefs.codegen.target = "numpy"
    brian2.defaultclock.dt = 1.0 * brian2.ms
    facts = {"a3_plus": 0.0, "a3_minus": 0.0, "tau_x": 101.0, "tau_y": 125.0} | rule
    source = brian2.SpikeGeneratorGroup(1, [0] * len(pre), np.array(pre) * brian2.ms)
    target = brian2.SpikeGeneratorGroup(1, [0] * len(post), np.array(post) * brian2.ms)
    synapses = brian2.Synapses(
        source,
        target,
        """w : 1
        dr1/dt = -r1 / (tau_plus * ms) : 1 (event-driven)
        dr2/dt = -r2 / (tau_x * ms) : 1 (event-driven)
        do1/dt = -o1 / (tau_minus * ms) : 1 (event-driven)
        do2/dt = -o2 / (tau_y * ms) : 1 (event-driven)""",
        on_pre="w -= o1 * (a_minus + a3_minus * r2); r1 += 1; r2 += 1",
        on_post="w += r1 * (a_plus + a3_plus * o2); o1 += 1; o2 += 1",
        namespace={**facts, "ms": brian2.ms},
    )
    synapses.connect()
    synapses.w = START
    brian2.Network(source, target, synapses).run(440 * brian2.ms)
    return float(synapses.w[0]) - START


def main() -> None:
    """Write the file."""
    nest.set_verbosity("M_ERROR")
    cases = []
    for rule in (PAIR, TRIPLET):
        for seed in range(3):
            pre, post = trains(seed)
            found = {"nest": with_nest(rule, pre, post), "brian2": with_brian(rule, pre, post)}
            cases.append({"rule": rule, "sources": pre, "targets": post, "change": found})
    FILE.write_text(json.dumps(cases) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
