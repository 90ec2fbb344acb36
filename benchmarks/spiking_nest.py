"""A network of spiking neurons in NEST, on one thread.

``PYTHON -m benchmarks.spiking_nest --child PROBLEM.npz SPIKES.npy`` prints JSON. It needs NumPy, but neither torch nor
this project's packages. NEST computes in float64.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import nest
import numpy as np

from benchmarks.child import settled_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

STEP_MS = 0.1


def build(given: Mapping[str, Any]) -> tuple[Any, Any, int, int]:
    """Return neurons, recorder, how many steps cells lag behind inputs, and the bytes before there are synapses."""
    nest.ResetKernel()
    nest.SetKernelStatus({"resolution": STEP_MS, "local_num_threads": 1})
    beta = float(given["beta"])
    tau = -STEP_MS / np.log(beta)
    neuron = {"E_L": 0.0, "V_m": 0.0, "V_reset": 0.0, "V_th": 1.0, "C_m": 1.0, "tau_m": tau, "t_ref": 0.0}
    cells = nest.Create("iaf_psc_delta", int(given["neurons"]), params=neuron)
    recorder = nest.Create("spike_recorder")
    nest.Connect(cells, recorder)
    if "inputs" in given:
        inputs, lag = given["inputs"], 2
        source = nest.Create("parrot_neuron", inputs.shape[1])
        times = [{"spike_times": np.round((column.nonzero()[0] + 1) * STEP_MS, 1)} for column in inputs.T]
        generators = nest.Create("spike_generator", inputs.shape[1], params=times)
        nest.Connect(generators, source, "one_to_one", {"delay": STEP_MS})
    else:
        source, lag = cells, 0
        cells.I_e = given["drive"] / ((1 - beta) * tau)  # NEST's C_m is 1
        cells.V_m = given["start"]
    before = settled_bytes()
    ids = np.asarray(source.tolist())[given["source"]], np.asarray(cells.tolist())[given["target"]]
    delay = given["delay"] * STEP_MS if "delay" in given else np.full(len(ids[0]), STEP_MS)
    nest.Connect(*ids, "one_to_one", {"weight": given["weight"].astype(float), "delay": delay})
    return cells, recorder, lag, before


def main() -> None:
    """Build, run, write the spikes and print times and bytes."""
    nest.verbosity = nest.VerbosityLevel.ERROR
    with np.load(sys.argv[2]) as file:  # reads each array when it is asked for
        blocks = file["blocks"].tolist()
        cells, recorder, lag, before = build(file)
    taken = []
    with nest.RunManager():
        if lag:
            nest.Run(lag * STEP_MS)
        for count in blocks:
            start = time.perf_counter()
            nest.Run(count * STEP_MS)
            taken.append(time.perf_counter() - start)
    held = settled_bytes() - before
    events = recorder.events
    steps = np.rint(np.asarray(events["times"]) / STEP_MS).astype(np.int64) - lag - 1
    np.save(sys.argv[3], np.stack([steps, events["senders"] - cells[0].global_id], 1))
    print(json.dumps({"version": nest.__version__, "held_bytes": held, "block_s": taken}))


if __name__ == "__main__":
    main()
