"""Neurons and synapses against NEST and Brian2, by what these computed (``golden/make.py``), in float64."""

from __future__ import annotations

import math

import torch

from q4_snn import LIF
from tests.support.simulators import case, run, steps_of


def test_refractory_neurons_of_nest() -> None:
    """A neuron that waits t_ref fires in NEST's steps, and has NEST's membrane in each; its input is lost meanwhile."""
    theirs = case("nest_refractory")
    facts, steps = theirs["params"], len(theirs["v"])
    decay = math.exp(-theirs["dt"] / facts["tau_m"])
    x = torch.full((steps,), (1 - decay) * facts["tau_m"] / facts["C_m"] * facts["I_e"], dtype=torch.float64)
    for which, weight in zip(("exciting", "inhibiting"), theirs["weights"], strict=True):
        x[steps_of(which)] += weight
    neuron = LIF.from_beta(
        decay, facts["V_th"], v_reset=facts["V_reset"], t_refractory=facts["t_ref"] * 1e-3, reset="value",
        threshold_inclusive=True,
    )  # fmt: skip
    fired, (mem, waits) = run(neuron, x)
    assert fired == theirs["fired"]
    assert len(fired) == 3
    torch.testing.assert_close(mem, theirs["v"], rtol=1e-12, atol=1e-12)
    assert waits[fired[0] - 1 : fired[0] + 22].tolist() == [0, *range(20, -1, -1), 0]


def test_refractory_neurons_of_brian() -> None:
    """Brian2 counts the step of the spike, too: its ``refractory`` is one step longer for the same neuron."""
    theirs = case("brian_refractory")
    neuron = LIF(
        theirs["params"]["tau"] * 1e-3, 1.0, v_threshold=15.0, v_reset=-3.0, t_refractory=2e-3, reset="value",
        threshold_inclusive=True,
    )  # fmt: skip
    fired, (mem, _) = run(neuron, torch.full((len(theirs["v"]),), theirs["params"]["drive"], dtype=torch.float64))
    assert fired == theirs["fired"]
    assert len(fired) == 2
    torch.testing.assert_close(mem, theirs["v"], rtol=1e-12, atol=1e-12)
