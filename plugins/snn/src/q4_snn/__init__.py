"""Spiking neural networks whose synapses have four bits: neurons, spike generators, networks, NIR."""

from __future__ import annotations

from q4_snn import spikegen, surrogate
from q4_snn.network import Network, NetworkState, NonFiniteStateError, Population, Projection
from q4_snn.neurons import ALIF, IF, LI, LIF, CubaLIF
from q4_snn.plugin import q4_layers

__all__ = [
    "ALIF",
    "IF",
    "LI",
    "LIF",
    "CubaLIF",
    "Network",
    "NetworkState",
    "NonFiniteStateError",
    "Population",
    "Projection",
    "q4_layers",
    "spikegen",
    "surrogate",
]
