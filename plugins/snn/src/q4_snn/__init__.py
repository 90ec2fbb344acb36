"""Spiking neural networks whose synapses have four bits: neurons, spike generators, networks, NIR, plasticity."""

from __future__ import annotations

from q4_snn import connectors, neurobench, plot, spikegen, surrogate
from q4_snn.datasets import SHD
from q4_snn.kinetics import AlphaSynapses, ExpSynapses
from q4_snn.maps import LayerProjection, Scale, SumPool2d
from q4_snn.network import Network, NetworkState
from q4_snn.neurons import ALIF, IF, LI, LIF, CubaLIF
from q4_snn.nir import NirError, NirWarning, from_nir, read_nir, to_nir, write_nir
from q4_snn.nonlinear import AdEx, Izhikevich
from q4_snn.plastic import PlasticProjection, PlasticSparseProjection
from q4_snn.plugin import q4_layers
from q4_snn.population import NonFiniteStateError, Population
from q4_snn.projection import Projection, Synapses
from q4_snn.recorders import Recorder
from q4_snn.sources import Poisson, PoissonInput, Regular, SpikeTimes
from q4_snn.sparse import SparseProjection
from q4_snn.stdp import STDP, STDPRule

__all__ = [
    "ALIF",
    "IF",
    "LI",
    "LIF",
    "SHD",
    "STDP",
    "AdEx",
    "AlphaSynapses",
    "CubaLIF",
    "ExpSynapses",
    "Izhikevich",
    "LayerProjection",
    "Network",
    "NetworkState",
    "NirError",
    "NirWarning",
    "NonFiniteStateError",
    "PlasticProjection",
    "PlasticSparseProjection",
    "Poisson",
    "PoissonInput",
    "Population",
    "Projection",
    "Recorder",
    "Regular",
    "STDPRule",
    "Scale",
    "SparseProjection",
    "SpikeTimes",
    "SumPool2d",
    "Synapses",
    "connectors",
    "from_nir",
    "neurobench",
    "plot",
    "q4_layers",
    "read_nir",
    "spikegen",
    "surrogate",
    "to_nir",
    "write_nir",
]
