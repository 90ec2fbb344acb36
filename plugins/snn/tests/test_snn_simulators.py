"""Neurons against NEST, Brian2 and Norse, by what these computed (folder ``golden``), in float64."""

from __future__ import annotations

import math

import torch

from q4_snn import LIF, AdEx, CubaLIF, Izhikevich
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


def test_refractory_neurons_of_norse() -> None:
    """Membranes, spikes and the steps that are left are those of Norse's ``lif_refrac_feed_forward_step``."""
    theirs = case("refractory", "norse.json")
    facts = theirs["params"]
    neuron = CubaLIF(
        1 / facts["tau_mem_inv"], 1 / facts["tau_syn_inv"], 1.0, facts["v_leak"], facts["v_th"], facts["v_reset"],
        dt=1e-3, reset="value", t_refractory=5e-3,
    )  # fmt: skip
    fired, (_, mem, waits) = run(neuron, theirs["x"])
    assert fired == theirs["fired"]
    assert len(fired) > 10
    torch.testing.assert_close(mem, theirs["v"], rtol=1e-12, atol=1e-12)
    assert torch.equal(waits, theirs["rho"])


def test_adex_of_norse() -> None:
    """Norse's ``lif_adex_feed_forward_step`` is AdEx with the threshold at the rheobase, in units of its own."""
    theirs = case("adex", "norse.json")
    facts = theirs["params"]
    neuron = AdEx(
        1 / facts["tau_mem_inv"], 1 / facts["tau_ada_inv"], 1.0, facts["adaptation_current"], facts["adaptation_spike"],
        facts["delta_T"], facts["v_leak"], facts["v_th"], facts["v_th"], facts["v_reset"], dt=1e-3,
    )  # fmt: skip
    fired, (adapt, mem) = run(neuron, theirs["x"])
    assert fired == theirs["fired"]
    assert len(fired) > 3
    torch.testing.assert_close(mem, theirs["v"], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(adapt, theirs["w"], rtol=1e-11, atol=1e-11)


def test_izhikevich_of_norse() -> None:
    """Norse's Izhikevich neurons take steps of 0.25 ms by its default ``tau_inv``."""
    theirs = case("izhikevich", "norse.json")
    fired, (recovery, mem) = run(Izhikevich(**theirs["params"], dt=2.5e-4), theirs["x"])
    assert fired == theirs["fired"]
    assert len(fired) == 3
    torch.testing.assert_close(mem, theirs["v"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(recovery, theirs["u"], rtol=1e-9, atol=1e-9)
