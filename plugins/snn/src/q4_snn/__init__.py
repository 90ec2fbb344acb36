"""Spiking neural networks whose synapses have four bits: neurons, spike generators, networks, NIR, plasticity."""

from __future__ import annotations

from q4_snn import connectors, spikegen, surrogate
from q4_snn.kinetics import AlphaSynapses, ExpSynapses
from q4_snn.network import Network, NetworkState
from q4_snn.neurons import ALIF, IF, LI, LIF, CubaLIF
from q4_snn.nir import NirError, from_nir, read_nir, to_nir, write_nir
from q4_snn.nonlinear import AdEx, Izhikevich
from q4_snn.plugin import q4_layers
from q4_snn.population import NonFiniteStateError, Population
from q4_snn.projection import Projection, Synapses
from q4_snn.recorders import Recorder
from q4_snn.sources import Poisson, Regular, SpikeTimes
from q4_snn.sparse import SparseProjection
from q4_snn.stdp import STDP

__all__ = [
    "ALIF",
    "IF",
    "LI",
    "LIF",
    "STDP",
    "AdEx",
    "AlphaSynapses",
    "CubaLIF",
    "ExpSynapses",
    "Izhikevich",
    "Network",
    "NetworkState",
    "NirError",
    "NonFiniteStateError",
    "Poisson",
    "Population",
    "Projection",
    "Recorder",
    "Regular",
    "SparseProjection",
    "SpikeTimes",
    "Synapses",
    "connectors",
    "from_nir",
    "q4_layers",
    "read_nir",
    "spikegen",
    "surrogate",
    "to_nir",
    "write_nir",
]
