"""A network of spiking neurons in Brian2, by the code that it generates at run time: Cython's, or NumPy's without one.

``PYTHON -m benchmarks.spiking_brian2 --child PROBLEM.npz SPIKES.npy`` prints JSON. It needs neither torch nor this
project's packages. Numbers are float64, Brian2's default. Spikes arrive before thresholds are tested, as elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import brian2 as brian
import numpy as np
from brian2.devices.device import auto_target

from benchmarks.child import settled_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

STEP = 0.1 * brian.ms


def build(given: Mapping[str, Any]) -> tuple[Any, Any, list[float], int, int]:
    """Return a network and the parts to read results from.

    Returns:
        Network, monitor, the list that gets the time at which each step starts, how many steps cells lag behind inputs,
        and the bytes before there are synapses.
    """
    count = int(given["neurons"])
    cells = brian.NeuronGroup(
        count, "dv/dt = (mu - v) / tau : 1\nmu : 1 (constant)", threshold="v > 1", reset="v = 0", method="exact",
        namespace={"tau": -STEP / np.log(float(given["beta"]))},
    )  # fmt: skip
    if "inputs" in given:
        steps, neurons = given["inputs"].nonzero()
        source, lag = brian.SpikeGeneratorGroup(given["inputs"].shape[1], neurons, steps * STEP), 1
    else:
        source, lag = cells, 0
        cells.mu, cells.v = given["drive"] / (1 - given["beta"]), given["start"]
    before = settled_bytes()
    synapses = brian.Synapses(source, cells, "w : 1", on_pre="v_post += w")
    synapses.connect(i=given["source"], j=given["target"])
    synapses.w = given["weight"]
    if "delay" in given:
        synapses.delay = (given["delay"] - 1) * STEP
    monitor, stamps = brian.SpikeMonitor(cells), []
    clock = brian.NetworkOperation(lambda: stamps.append(time.perf_counter()), when="start")
    network = brian.Network({cells, source, synapses, monitor, clock})
    network.schedule = ["start", "groups", "synapses", "thresholds", "resets", "end"]
    return network, monitor, stamps, lag, before


def main() -> None:
    """Build, run, write the spikes and print times and bytes."""
    brian.defaultclock.dt = STEP
    with np.load(sys.argv[2]) as file:
        is_layer = "inputs" in file
        blocks = file["blocks"]
    one = np.ones(1)
    small = {"source": np.zeros(1, int), "target": np.zeros(1, int), "weight": one, "neurons": 1, "beta": 0.5}
    small |= {"inputs": np.ones((1, 1))} if is_layer else {"drive": one, "start": one, "delay": one}
    build(small)[0].run(2 * STEP)  # what the library takes for itself
    with np.load(sys.argv[2]) as file:  # reads each array when it is asked for
        if not (compiling := os.fork()):  # in a process that goes: the compiler's memory is none of the synapses'
            build(file)[0].run(STEP)
            os._exit(0)
        os.waitpid(compiling, 0)
        network, monitor, stamps, lag, before = build(file)
    network.run((int(blocks.sum()) + lag + 1) * STEP)
    held = settled_bytes() - before
    ends = np.cumsum([lag, *blocks])
    taken = np.diff([stamps[end] for end in ends])
    steps = np.rint(monitor.t / STEP).astype(np.int64) - lag
    found = np.stack([steps, np.asarray(monitor.i, np.int64)], 1)
    np.save(sys.argv[3], found[steps < blocks.sum()])
    facts = {"version": brian.__version__, "code": auto_target().class_name}
    print(json.dumps(facts | {"held_bytes": held, "block_s": taken.tolist()}))


if __name__ == "__main__":
    main()
