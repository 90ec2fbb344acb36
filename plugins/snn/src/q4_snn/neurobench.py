"""NeuroBench's measures of a network: footprint, sparsity of connections and activations, synaptic operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from q4_snn.projection import Projection
from q4core import InputError, Q4Linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_snn.network import Network
    from q4_snn.population import Population

__all__ = ["measure"]


def measure(network: Network, x: torch.Tensor | Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what NeuroBench's harness reports of a network, by its names.

    NeuroBench counts by hooks of torch's layers, which packed layers and programs don't call. So the spikes of a run
    are counted here, by its definitions.

    Args:
        network: Of ``Projection`` alone.
        x: As the network takes it, [T, B, n]; operations are those of a mean sample.

    Returns:
        ``footprint`` in bytes, of parameters, packed weights and buffers; ``connection_sparsity`` and
        ``activation_sparsity``, from 0 to 1; and ``synaptic_operations``: ``Effective_MACs`` of inputs of other numbers
        than spikes, ``Effective_ACs`` of spikes, both without those with a weight or a value of 0, and ``Dense``.

    Raises:
        InputError: A projection is of another class, or x does not fit.

    Reference:
        Yik et al., The NeuroBench framework for benchmarking neuromorphic computing algorithms and systems, 2025.
    """
    for name, item in network.projections.items():
        if not isinstance(item, Projection):
            rule = "a Projection, whose operations are counted"
            raise InputError(f"projection {name!r}", name="class", rule=rule, value=type(item).__name__)
    names = [name for name in network.order if name not in network.inputs]
    with torch.no_grad():
        found, _ = network(x, record=names)
        given = {network.inputs[0]: x} if isinstance(x, torch.Tensor) else {name: x[name] for name in network.inputs}
        given |= found
        batch = next(iter(given.values())).shape[1]
        effective = {"Effective_MACs": 0.0, "Effective_ACs": 0.0}
        dense, zeros, weights = 0.0, 0, 0
        for module in network.projections.values():
            item = cast("Projection", module)
            weight, source = item.dense_weight(), given[item.source]
            arrived = source[: max(0, len(source) - item.delay)].double()
            kind = "Effective_ACs" if _is_binary(source) else "Effective_MACs"
            per_source = (weight != 0).sum(0).double()
            effective[kind] += float(((arrived != 0).double() @ per_source).sum()) / batch
            dense += len(source) * weight.numel()
            zeros += int((weight == 0).sum())
            weights += weight.numel()
        fires = [name for name in names if cast("Population", network.populations[name]).is_binary]
        places = sum(found[name].numel() for name in fires)
        spikes = sum(float(found[name].count_nonzero()) for name in fires)
    return {
        "footprint": _bytes_of(network),
        "connection_sparsity": zeros / weights if weights else 0.0,
        "activation_sparsity": 1 - spikes / places if places else 0.0,
        "synaptic_operations": {**effective, "Dense": dense},
    }


def _is_binary(values: torch.Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _bytes_of(network: Network) -> int:
    tensors = {id(item): item.nbytes for item in (*network.parameters(), *network.buffers())}
    packed = 0
    for module in network.modules():
        if isinstance(module, Q4Linear):
            weight = module.packed_weight()
            parts = (weight.qdata, weight.scale, weight.offset, weight.global_scale)
            packed += sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
            tensors |= {id(item): 0 for name, item in module.named_buffers() if name != "bias"}
    return sum(tensors.values()) + packed
