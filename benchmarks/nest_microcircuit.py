"""The microcircuit in NEST: run by a Python that has it, with the parameters of ``examples/microcircuit.py``.

``PYTHON -m benchmarks.nest_microcircuit --child PARAMETERS.json SPIKES.npy`` prints JSON; it imports nothing else of
this repository.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import nest
import numpy as np


def resident_bytes() -> int:
    """Return what this process holds in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def build(facts: dict[str, Any]) -> tuple[list[Any], Any, dict[str, float]]:
    """Make populations, synapses and input; return populations, recorder, and what the synapses take."""
    nest.ResetKernel()
    nest.verbosity = nest.VerbosityLevel.ERROR
    nest.SetKernelStatus({"resolution": facts["step"], "local_num_threads": 1, "rng_seed": facts["seed"]})
    neuron = {
        "E_L": 0.0, "V_reset": 0.0, "V_th": facts["threshold"], "C_m": facts["capacity"], "tau_m": facts["membrane"],
        "tau_syn_ex": facts["synapse"], "tau_syn_in": facts["synapse"], "t_ref": facts["refractory"] * facts["step"],
    }  # fmt: skip
    recorder = nest.Create("spike_recorder")
    populations = []
    for index, size in enumerate(facts["sizes"]):
        made = nest.Create("iaf_psc_exp", size, params=neuron | {"I_e": facts["current"][index]})
        made.V_m = nest.random.normal(mean=facts["start"], std=facts["start_spread"])
        outside = nest.Create("poisson_generator", params={"rate": facts["outside"][index]})
        nest.Connect(outside, made, syn_spec={"weight": facts["outside_weight"], "delay": 1.5})
        nest.Connect(made, recorder)
        populations.append(made)
    before, start = resident_bytes(), time.perf_counter()
    for i, target in enumerate(populations):
        for j, source in enumerate(populations):
            if not facts["counts"][i][j]:
                continue
            weight, delay = facts["weight"][i][j], facts["delay"][i][j] * facts["step"]
            ends = {"min": 0.0} if weight > 0 else {"max": 0.0}
            drawn = nest.random.normal(mean=weight, std=abs(weight) * facts["weight_spread"])
            wait = nest.random.normal(mean=delay, std=delay * facts["delay_spread"])
            how = {
                "weight": nest.math.redraw(drawn, min=ends.get("min", -np.inf), max=ends.get("max", np.inf)),
                "delay": nest.math.redraw(wait, min=facts["step"] * 0.5, max=np.inf),
            }
            rule = {"rule": "fixed_total_number", "N": facts["counts"][i][j]}
            nest.Connect(source, target, rule, how)
    return populations, recorder, {"build_s": time.perf_counter() - start, "before": before}


def main() -> None:
    """Build, run, write the spikes and print times and bytes."""
    facts = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    populations, recorder, costs = build(facts)
    start, busy = time.perf_counter(), time.process_time()
    nest.Simulate(facts["seconds"] * 1e3)
    took, busy = time.perf_counter() - start, time.process_time() - busy
    held = resident_bytes() - costs["before"]
    first = np.cumsum([0, *facts["sizes"]])
    ids = np.concatenate([np.asarray(item.tolist()) for item in populations])
    place = np.full(ids.max() + 1, -1)
    place[ids] = np.arange(first[-1])
    events = recorder.events
    steps = np.rint(np.asarray(events["times"]) / facts["step"]).astype(np.int64) - 1
    np.save(sys.argv[3], np.stack([steps, place[events["senders"]]], 1))
    synapses = sum(map(sum, facts["counts"]))
    print(json.dumps({
        "version": nest.__version__, "seconds": took, "cpu_s": busy, "build_s": costs["build_s"],
        "bytes_per_synapse": held / synapses,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
