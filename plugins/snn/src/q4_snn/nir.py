"""Networks as graphs of NIR, the Neuromorphic Intermediate Representation, and back; ``nir`` is an extra.

NIR states equations, no step: neither dt nor a reset by subtraction is in it. Both are written as metadata, with the
4-bit format of synapses, and read where they are there. What a graph does not state, the caller does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from q4_snn.network import Network
from q4_snn.neurons import IF, LI, LIF, CubaLIF
from q4_snn.nir_graph import NODES, NirError, clean, closing, flattened, paths_from, sizes_of
from q4_snn.population import Population
from q4_snn.projection import Projection
from q4core import ConfigError, PluginError
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    import os

    from q4_snn.neuron import Neuron, Reset

__all__ = ["NirError", "from_nir", "read_nir", "to_nir", "write_nir"]

_NEURONS: dict[str, type[Neuron]] = {"LIF": LIF, "CubaLIF": CubaLIF, "LI": LI, "IF": IF}
_FIELDS = {
    "LIF": ("tau_mem", "r", "v_leak", "v_threshold", "v_reset"),
    "CubaLIF": ("tau_mem", "tau_syn", "r", "v_leak", "v_threshold", "v_reset", "w_in"),
    "LI": ("tau_mem", "r", "v_leak"),
    "IF": ("r", "v_threshold", "v_reset"),
}
_GAINS = {"r": "tau_mem", "w_in": "tau_syn"}
_OPTIONS = ("reset", "reset_delay", "threshold_inclusive")
_ROUNDING = 1e-6
"""Gains this close to 1 are 1: files hold float32 numbers, whose quotients are not exact."""


def _nir() -> Any:
    try:
        import nir  # noqa: PLC0415  # an extra
    except ImportError as error:
        hint = 'pip install "q4-snn[nir]"'
        raise PluginError("NIR", name="package nir", rule="installed", value=str(error), hint=hint) from error
    return nir


def read_nir(path: str | os.PathLike[str], **options: Any) -> Network:
    """Return the network of a file; as ``from_nir``, which also says what the options are.

    Raises:
        NirError: As of ``from_nir``; or it is no file of NIR.
        PluginError: ``nir`` is not installed.
    """
    nir = _nir()
    try:
        graph = nir.read(path, type_check=False)  # it rejects one number for all neurons; from_nir checks sizes
    except PLUGIN_FAULTS as error:  # HDF5's and NIR's, of any file
        raise NirError(f"no file of NIR: {describe_exception(error)}", where=str(path)) from error
    return from_nir(graph, **options)


def write_nir(path: str | os.PathLike[str], network: Network) -> None:
    """Write a network to a file; as ``to_nir``."""
    _nir().write(path, to_nir(network))


# -- export


def to_nir(network: Network) -> Any:
    """Return a network as a ``nir.NIRGraph``, its weights as the dense numbers that its forward pass uses.

    Where a projection closes a cycle, NIR's readers take one step of delay for granted; every further step, and
    delays elsewhere, are ``Delay`` nodes.

    Raises:
        NirError: A neuron or projection has no node in NIR, or populations differ in dt.
        PluginError: ``nir`` is not installed.
    """
    nir = _nir()
    populations = [cast("Population", item) for item in network.populations.values()]
    steps = {item.neuron.dt for item in populations if item.neuron is not None}
    if len(steps) != 1:
        raise NirError("to_nir", name="dt", rule="one for all populations", value=sorted(steps))
    (dt,) = steps
    nodes = {item.name: _node_of(nir, item) for item in populations}
    edges: list[tuple[str, str]] = []
    for name, item in network.projections.items():
        if not isinstance(item, Projection):
            rule = "a Projection, as NIR has dense weights alone"
            raise NirError("to_nir", name="projection", rule=rule, value=type(item).__name__, where=name)
        if taken := {name, f"{name}_delay"} & {*nodes}:
            raise NirError("to_nir", name="name", rule="that of one node", value=min(taken), where=name)
        metadata = {"delay": item.delay, **({} if item.format is None else {"q4_format": item.format})}
        weight, bias = item.dense_weight().cpu().numpy(), getattr(item.synapses, "bias", None)
        nodes[name] = (
            nir.Linear(weight, metadata=metadata)
            if bias is None
            else nir.Affine(weight, bias.detach().cpu().numpy(), metadata=metadata)
        )
        edges.append((item.source, name))
        if further := item.delay - network.graph.closes_cycle(item):
            nodes[f"{name}_delay"] = nir.Delay(np.full(item.target_size, further * dt))
            edges += [(name, f"{name}_delay"), (f"{name}_delay", item.target)]
        else:
            edges.append((name, item.target))
    for name in network.outputs:
        nodes[f"{name}_output"] = nir.Output(nodes[name].output_type["output"])
        edges.append((name, f"{name}_output"))
    return nir.NIRGraph(nodes, edges, metadata={"dt": dt})


def _node_of(nir: Any, population: Population) -> Any:
    """Return the node of an input or of neurons, with one number of each parameter for each neuron."""
    neuron = population.neuron
    if neuron is None:
        return nir.Input(np.array([population.size]))
    kind = type(neuron).__name__
    if kind not in _NEURONS:
        rule = f"one of {', '.join(_NEURONS)}, which NIR has"
        raise NirError("to_nir", name="neuron", rule=rule, value=kind, where=population.name)
    values = {}
    for name in _FIELDS[kind]:
        value = getattr(neuron, name, None)
        if value is None:  # one unit adds 1 in a step
            value = getattr(neuron, _GAINS[name], 1.0) / neuron.dt
        array = value.detach().cpu().double().numpy() if isinstance(value, torch.Tensor) else value
        values[_nir_name(kind, name)] = np.zeros(population.size) + array
    metadata = {name: getattr(neuron, name) for name in _OPTIONS if hasattr(neuron, name)}
    if (time := getattr(neuron, "t_refractory", None)) is not None:
        metadata["t_refractory"] = time.cpu().double().numpy() if isinstance(time, torch.Tensor) else time
    return getattr(nir, kind)(**values, metadata=metadata)


def _nir_name(kind: str, name: str) -> str:
    return "tau" if name == "tau_mem" and kind != "CubaLIF" else name


# -- import


def from_nir(
    graph: Any, *, dt: float | None = None, reset: Reset | None = None, reset_delay: bool | None = None
) -> Network:
    """Return the network of a ``nir.NIRGraph``.

    Args:
        graph: Of the nodes Input, Output, Linear, Affine, LIF, CubaLIF, LI, IF, Delay, Flatten, and graphs of these.
        dt: Seconds of a step, in place of the graph's metadata. snnTorch and SpikingJelly take 1e-4. Norse
            1.1 with its own dt of 1e-3 writes time constants multiplied by that, so its files need 1e-6.
        reset: In place of the metadata; without either ``value``, which is NIR's.
        reset_delay: In place of the metadata; without either False. snnTorch's own default is
            ``reset="subtract", reset_delay=True``, which its export does not state.

    Returns:
        A network whose projections are named as the graph's weights; those with a ``q4_format`` train in it. A
        projection that closes a cycle takes one step.

    Raises:
        NirError: A node is not one of these, neurons are joined without weights or by two, sizes do not fit, or
            nobody states dt.
    """
    stated = graph.metadata.get("dt") if dt is None else dt
    if stated is None:
        hint = "snnTorch and SpikingJelly mean 1e-4 by their files; those of Norse 1.1 need 1e-6."
        raise NirError("from_nir", name="dt", rule="given, as the graph states none", value=None, hint=hint)
    if not 0 < float(stated) < np.inf:
        raise NirError("from_nir", name="dt", rule="above 0 seconds", value=stated)
    options: dict[str, Any] = {"dt": float(stated), "reset": reset, "reset_delay": reset_delay}
    nodes, edges = flattened(graph, "")
    for name, node in nodes.items():
        if type(node).__name__ not in NODES:
            rule = f"one of {', '.join(NODES)}"
            raise NirError("from_nir", name="node", rule=rule, value=type(node).__name__, where=name)
    inputs = {clean(name) for name in graph.inputs}
    ends = [name for name in nodes if name in inputs or type(nodes[name]).__name__ in _NEURONS]
    paths = [path for name in ends for path in paths_from(name, nodes, edges, options["dt"])]
    sizes = sizes_of(ends, nodes, paths)
    populations = {
        name: Population(name, sizes[name], _neuron(name, nodes[name], options) if name not in inputs else None)
        for name in ends
    }
    closes = closing(ends, paths)
    names = [path.weight for path in paths]
    projections = []
    for index, path in enumerate(paths):
        node, is_first = nodes[path.weight], path.weight not in names[:index]
        name = path.weight if names.count(path.weight) == 1 else f"{path.weight}:{path.source}->{path.target}"
        made = Projection(
            populations[path.source],
            populations[path.target],
            format=node.metadata.get("q4_format"),
            delay=int(node.metadata.get("delay", path.delay + (index in closes))),
            bias=hasattr(node, "bias") and (is_first or path.target not in {p.target for p in paths[:index]}),
            name=name,
        )
        state = {"weight": torch.from_numpy(np.array(node.weight, np.float32))}
        if getattr(made.synapses, "bias", None) is not None:
            state["bias"] = torch.from_numpy(np.array(node.bias, np.float32))
        made.synapses.load_state_dict(state)
        projections.append(made)
    return Network([*populations.values()], projections)


def _neuron(name: str, node: Any, options: dict[str, Any]) -> Neuron:
    kind, dt = type(node).__name__, options["dt"]
    values: dict[str, Any] = {}
    for field in _FIELDS[kind]:
        array = np.asarray(getattr(node, _nir_name(kind, field)), np.float64).reshape(-1)
        is_one = array.size > 0 and bool((array == array[0]).all())
        values[field] = float(array[0]) if is_one else torch.from_numpy(array)
    for gain, tau in _GAINS.items():
        if gain in values:
            product = torch.as_tensor(values[gain]) * dt / torch.as_tensor(values.get(tau, 1.0))
            if bool(((product - 1).abs() <= _ROUNDING).all()):
                del values[gain]
    for option in _OPTIONS if kind != "LI" else ():
        value = node.metadata.get(option) if options.get(option) is None else options[option]
        if value is not None:
            values[option] = str(value) if option == "reset" else bool(value)
    if kind != "LI":
        values.setdefault("reset", "value")
        time = np.asarray(node.metadata.get("t_refractory", 0.0), np.float64)
        values["t_refractory"] = torch.from_numpy(time) if time.ndim else float(time)
    try:
        return _NEURONS[kind](dt=dt, **values)
    except ConfigError as error:
        raise NirError("from_nir", name=error.name, rule=error.rule, value=error.value, where=name) from error
