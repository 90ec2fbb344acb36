"""Write ``norse.json``: what Norse computes for single neurons in float64, for tests without it.

Nothing here imports q4core. Run it in an environment that has torch and ``pip install norse``::

    python plugins/snn/tests/golden/make_norse.py
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from norse.torch.functional import izhikevich, lif, lif_adex, lif_refrac

FILE = Path(__file__).with_name("norse.json")
DT = 1e-3
STEPS = 200


def number(value: float) -> torch.Tensor:
    """Return a number of float64."""
    return torch.tensor([value], dtype=torch.float64)


def currents() -> torch.Tensor:
    """Return random currents [T]."""
    return torch.rand(STEPS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def refractory() -> dict[str, Any]:
    """Return a current-based neuron that waits five steps."""
    numbers = {"tau_mem_inv": 50.0, "tau_syn_inv": 200.0, "v_leak": 0.1, "v_th": 0.6, "v_reset": -0.2}
    p = lif_refrac.LIFRefracParameters(lif.LIFParameters(**{k: number(v) for k, v in numbers.items()}), number(5.0))
    state = lif_refrac.LIFRefracFeedForwardState(lif.LIFFeedForwardState(number(0.1), number(0.0)), number(0.0))
    fired, v, rho = [], [], []
    for step, x in enumerate(currents()):
        z, state = lif_refrac.lif_refrac_feed_forward_step(x[None], state, p, DT)
        fired += [step] if z else []
        v.append(float(state.lif.v))
        rho.append(float(state.rho))
    return {"params": numbers, "x": currents().tolist(), "fired": fired, "v": v, "rho": rho}


def adex() -> dict[str, Any]:
    """Return an adaptive exponential neuron, in Norse's units."""
    numbers = {
        "adaptation_current": 4.0,
        "adaptation_spike": 0.5,
        "delta_T": 0.5,
        "tau_ada_inv": 2.0,
        "tau_mem_inv": 100.0,
    }
    numbers |= {"tau_syn_inv": 1000.0, "v_leak": 0.0, "v_th": 1.0, "v_reset": 0.0}
    p = lif_adex.LIFAdExParameters(**{key: number(value) for key, value in numbers.items()})
    state = lif_adex.LIFAdExFeedForwardState(number(0.0), number(0.0), number(0.0))
    fired, v, w = [], [], []
    for step, x in enumerate(currents() * 4):  # an inverse time constant of 1 / dt: the current lasts for one step
        z, state = lif_adex.lif_adex_feed_forward_step(x[None], state, p, DT)
        fired += [step] if z else []
        v.append(float(state.v))
        w.append(float(state.a))
    return {"params": numbers, "x": (currents() * 4).tolist(), "fired": fired, "v": v, "w": w}


def izhikevich_() -> dict[str, Any]:
    """Return a regular spiking neuron; 250 steps of a second are 250 ms · 0.25."""
    numbers = {"a": 0.02, "b": 0.2, "c": -65.0, "d": 8.0}
    p = izhikevich.IzhikevichParameters(**numbers, tau_inv=250)
    state = izhikevich.IzhikevichState(number(-65.0), number(-13.0))
    fired, v, u = [], [], []
    for step, x in enumerate(currents() * 30):
        z, state = izhikevich.izhikevich_feed_forward_step(x[None], state, p, DT)
        fired += [step] if z else []
        v.append(float(state.v))
        u.append(float(state.u))
    return {"params": numbers, "x": (currents() * 30).tolist(), "fired": fired, "v": v, "u": u}


def main() -> None:
    """Write the file."""
    cases = {"refractory": refractory(), "adex": adex(), "izhikevich": izhikevich_()}
    facts = {"versions": {"norse": importlib.metadata.version("norse")}, "cases": cases}
    FILE.write_text(json.dumps(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
