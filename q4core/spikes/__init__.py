"""The sparse product of spikes: a layer's rows of 0 and 1, at the cost of the ones.

``SpikeProduct`` asks the backend that prepared a layer; ``RunsSpikes`` is what such a backend has.
"""

from q4core.backend.spikes import RunsSpikes
from q4core.layers.diagnosis import SpikeRecord
from q4core.spikes.product import SpikeProduct

__all__ = ["RunsSpikes", "SpikeProduct", "SpikeRecord"]
