"""Write ``simulators.json``: what NEST and Brian2 compute for single neurons, for tests without them.

Nothing here imports q4core. Run it in an environment that has both (``pip install --group simulators``)::

    python plugins/snn/tests/golden/make.py

Every case has the state after each step, and the steps in which the neuron fired, counted from 0. Times are in ms,
voltages in mV, currents in pA for NEST and in nA for Brian2, as these take them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import brian2
import nest
import numpy as np

FILE = Path(__file__).with_name("simulators.json")
EXCITING = (*range(3, 40, 6), *range(40, 50), *range(55, 90, 6))
INHIBITING = (*range(10, 90, 15),)
"""Steps in which spikes arrive."""


def with_nest(model: str, steps: int, record: dict[str, str], dt: float = 0.1, **params: Any) -> dict[str, Any]:
    """Return what a neuron of NEST does; ``weights`` are those of the exciting and the inhibiting spikes."""
    weights = params.pop("weights", ())
    nest.ResetKernel()
    nest.resolution = dt
    neuron = nest.Create(model, params=params)
    meter = nest.Create("multimeter", params={"record_from": list(record), "interval": dt})
    recorder = nest.Create("spike_recorder")
    nest.Connect(meter, neuron)
    nest.Connect(neuron, recorder)
    for weight, arrivals in zip(weights, (EXCITING, INHIBITING), strict=False):
        times = [round(dt * step, 6) for step in arrivals]  # and one step later it is there, at the end of this step
        source = nest.Create("spike_generator", params={"spike_times": times})
        nest.Connect(source, neuron, syn_spec={"weight": weight, "delay": dt})
    nest.Simulate(dt * (steps + 1))
    found = meter.get("events")
    fired = np.rint(np.asarray(recorder.get("events")["times"]) / dt).astype(int) - 1
    return {"dt": dt, "params": params, "weights": weights, "fired": [int(step) for step in fired if step < steps]} | {
        ours: [float(value) for value in found[theirs][:steps]] for theirs, ours in record.items()
    }


def with_brian(equations: str, steps: int, record: tuple[str, ...], dt: float, **params: Any) -> dict[str, Any]:
    """Return what a neuron of Brian2 does, by forward Euler; time has no unit in its equations but ms."""
    brian2.start_scope()
    brian2.prefs.codegen.target = "numpy"
    brian2.defaultclock.dt = dt * brian2.ms
    start, options = params.pop("start"), params.pop("options")
    group = brian2.NeuronGroup(1, equations, method="euler", namespace={**params, "ms": brian2.ms}, **options)
    for name, value in start.items():
        setattr(group, name, value)
    states = brian2.StateMonitor(group, record, record=True, when="end")
    spikes = brian2.SpikeMonitor(group)
    brian2.Network(group, states, spikes).run(steps * dt * brian2.ms)
    fired = np.rint(np.asarray(spikes.t / brian2.ms) / dt).astype(int)
    return {"dt": dt, "params": params, "start": start, "fired": fired.tolist()} | {
        name: [float(value) for value in getattr(states, name)[0]] for name in record
    }


def cases() -> dict[str, Any]:
    """Return every case by its name."""
    lif = {"E_L": 0.0, "V_m": 0.0, "V_reset": -3.0, "V_th": 15.0, "tau_m": 10.0, "C_m": 250.0, "t_ref": 2.0}
    found: dict[str, Any] = {
        "nest_refractory": with_nest("iaf_psc_delta", 400, {"V_m": "v"}, I_e=450.0, weights=(3.0, -2.0), **lif),
        "nest_exp": with_nest(
            "iaf_psc_exp", 120, {"I_syn_ex": "ex", "I_syn_in": "in"}, weights=(300.0, -200.0),
            tau_syn_ex=2.0, tau_syn_in=5.0, **lif,
        ),
        "nest_alpha": with_nest(
            "iaf_psc_alpha", 120, {"I_syn_ex": "ex", "I_syn_in": "in"}, weights=(300.0, -200.0),
            tau_syn_ex=2.0, tau_syn_in=5.0, **lif,
        ),
        "nest_conductance": with_nest(
            "iaf_cond_exp", 120, {"g_ex": "ex", "g_in": "in", "V_m": "v"}, dt=0.01, weights=(8.0, -6.0),
            E_L=-70.0, V_reset=-60.0, V_th=-55.0, C_m=250.0, g_L=25.0, E_ex=0.0, E_in=-85.0, t_ref=0.2,
            tau_syn_ex=0.5, tau_syn_in=2.0, I_e=200.0,
        ),
        "nest_izhikevich": with_nest(
            "izhikevich", 600, {"V_m": "v", "U_m": "u"}, V_m=-65.0, U_m=-13.0, a=0.02, b=0.2, c=-65.0, d=8.0,
            I_e=10.0, V_th=30.0, consistent_integration=True,
        ),
        "nest_adex": {
            **with_nest(
                "aeif_cond_exp", 30_000, {"V_m": "v"}, dt=0.01, V_m=-70.6, w=0.0, C_m=281.0, g_L=30.0, E_L=-70.6,
                V_th=-50.4, Delta_T=2.0, tau_w=144.0, a=4.0, b=80.5, V_reset=-70.6, V_peak=20.0, t_ref=0.0, I_e=1000.0,
            ),
            "v": [],
        },
    }  # fmt: skip
    refractory = {"threshold": "v >= 15", "reset": "v = -3", "refractory": 2.1 * brian2.ms}
    found["brian_refractory"] = with_brian(
        "dv/dt = (drive - v) / (tau * ms) : 1 (unless refractory)", 400, ("v",), 0.1, drive=18.0, tau=10.0,
        start={"v": 0.0}, options=refractory,
    )  # fmt: skip
    found["brian_izhikevich"] = with_brian(
        """dv/dt = (0.04 * v**2 + 5 * v + 140 - u + drive) / ms : 1
        du/dt = a * (b * v - u) / ms : 1""",
        600, ("v", "u"), 0.25, a=0.1, b=0.2, drive=10.0, start={"v": -65.0, "u": -13.0},
        options={"threshold": "v >= 30", "reset": "v = -65; u += 2"},
    )  # fmt: skip
    found["brian_adex"] = with_brian(
        """dv/dt = (el - v + delta * exp((clip(v, -1000, 20) - vt) / delta) + r * (drive - w)) / (tau * ms) : 1
        dw/dt = (a * (v - el) - w) / (tauw * ms) : 1""",
        1_000, ("v", "w"), 0.05,
        el=-70.6, vt=-50.4, delta=2.0, r=1000 / 30, drive=1.0, tau=281 / 30, tauw=144.0, a=0.004,
        start={"v": -70.6, "w": 0.0}, options={"threshold": "v > 20", "reset": "v = -70.6; w += 0.0805"},
    )  # fmt: skip
    return found


def main() -> None:
    """Write the file."""
    facts = {"versions": {"nest": nest.__version__, "brian2": brian2.__version__}}
    arrivals = {"exciting": EXCITING, "inhibiting": INHIBITING}
    FILE.write_text(json.dumps({**facts, **arrivals, "cases": cases()}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
