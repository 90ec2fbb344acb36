"""Networks as graphs of NIR, the Neuromorphic Intermediate Representation, and back; ``nir`` is an extra.

NIR states equations, no step: neither dt nor a reset by subtraction is in it. Both are written as metadata, with the
4-bit format of synapses, and read where they are there. What a graph does not state, the caller does.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from q4_snn.conventions import CONVENTIONS
from q4_snn.kinetics import ExpSynapses
from q4_snn.maps import LayerProjection
from q4_snn.network import Network
from q4_snn.neurons import IF, LI, LIF, CubaLIF
from q4_snn.nir_graph import (
    MATRICES,
    NODES,
    NirError,
    NirWarning,
    clean,
    closing,
    filters_of,
    flattened,
    numbers,
    paths_from,
)
from q4_snn.nir_layers import layer_of, nodes_of, shape_after
from q4_snn.population import Population
from q4_snn.projection import Projection
from q4core import ConfigError, PluginError
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from q4_snn.conventions import Convention
    from q4_snn.neuron import Neuron, Reset
    from q4_snn.nir_graph import Path
    from q4_snn.projection import Synapses

__all__ = ["NirError", "NirWarning", "from_nir", "read_nir", "to_nir", "write_nir"]

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
    delays elsewhere, are ``Delay`` nodes. What NIR has no field for is metadata, which this package reads: a
    ``NirWarning`` says what others will not.

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
    shapes = _shapes(network)
    nodes = {item.name: _node_of(nir, item, shapes[item.name]) for item in populations}
    edges: list[tuple[str, str]] = []
    for name, whole in network.projections.items():
        item = _filtered(whole)
        if not isinstance(item, (Projection, LayerProjection)):
            rule = "a Projection or LayerProjection, as NIR has dense weights alone; ExpSynapses of currents around one"
            raise NirError("to_nir", name="projection", rule=rule, value=type(whole).__name__, where=name)
        if taken := {name, f"{name}_delay", f"{name}_synapses"} & {*nodes}:
            raise NirError("to_nir", name="name", rule="that of one node", value=min(taken), where=name)
        found = _chain_of(nir, item, shapes[item.source], shapes[item.target])
        names = [name if len(found) == 1 else f"{name}_{index}" for index in range(len(found))]
        for each, node in zip(names, found, strict=True):
            node.metadata |= {"delay": item.delay, "projection": name}
            nodes[each] = node
        way = [item.source, *names]
        if further := item.delay - network.graph.closes_cycle(item):
            nodes[f"{name}_delay"] = nir.Delay(np.full(shapes[item.target], further * dt))
            way.append(f"{name}_delay")
        if whole is not item:
            nodes[f"{name}_synapses"] = _filter_of(nir, cast("ExpSynapses", whole), shapes[item.target])
            way.append(f"{name}_synapses")
        edges += [*itertools.pairwise([*way, item.target])]
    for name in network.outputs:
        nodes[f"{name}_output"] = nir.Output(nodes[name].output_type["output"])
        edges.append((name, f"{name}_output"))
    wrong = _misjudged(nodes)
    lost = [*_lost(populations), *wrong]
    if lost:
        warnings.warn(f"other programs read this graph without {'; '.join(lost)}", NirWarning, stacklevel=2)
    return nir.NIRGraph(nodes, edges, metadata={"dt": dt}, type_check=not wrong)


def _filtered(item: nn.Module) -> nn.Module:
    """Return the projection in ``ExpSynapses`` of currents; all others as they are."""
    return cast("nn.Module", item.inner) if type(item) is ExpSynapses and item.reversal is None else item


def _filter_of(nir: Any, item: ExpSynapses, shape: tuple[int, ...]) -> Any:
    """Return a time course as an LI, whose Euler step has the same decay, and to which a spike adds its weight."""
    tau_syn = torch.as_tensor(item.tau_syn).detach().cpu().double().expand(item.target_size).numpy()
    tau = (item.dt / -np.expm1(-item.dt / tau_syn)).reshape(shape)
    return nir.LI(tau, tau / item.dt, 0 * tau, metadata={"tau_syn": tau_syn})


def _lost(populations: Sequence[Population]) -> list[str]:
    """Return the facts of neurons that are metadata alone, for which NIR has no field."""
    plain = {"reset": ("value", None), "reset_delay": (False, None), "threshold_inclusive": (False, None)}
    found = []
    for item in populations:
        neuron = item.neuron
        stated = {name: getattr(neuron, name, None) for name in plain}
        facts = [f"{name}={value!r}" for name, value in stated.items() if value not in plain[name]]
        if bool((torch.as_tensor(getattr(neuron, "t_refractory", 0.0)) > 0).any()):
            facts.append("its refractory time")
        if facts:
            found.append(f"{', '.join(facts)} of population {item.name!r}")
    return found


def _misjudged(nodes: dict[str, Any]) -> list[str]:
    """Return the convolutions whose output nir takes for another shape: it knows square kernels alone."""
    return [
        f"type_check=False, as nir takes the kernel of {name!r} for a square one"
        for name, node in nodes.items()
        if type(node).__name__ == "Conv2d" and len({*np.shape(node.weight)[2:]}) > 1
    ]


def _shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Return the shape of each population: that of maps where layers give or take maps, else its size."""
    found: dict[str, tuple[int, ...]] = {
        name: (cast("Population", item).size,) for name, item in network.populations.items()
    }
    for role, name_of in (("target", "target_shape"), ("source", "shape")):
        for name, item in ((name, _filtered(whole)) for name, whole in network.projections.items()):
            if not isinstance(item, LayerProjection) or len(shape := getattr(item, name_of)) == 1:
                continue
            end = getattr(item, role)
            if len(found[end]) > 1 and found[end] != shape:
                rule = f"of shape {[*found[end]]}, as by another projection"
                raise NirError("to_nir", name="shape", rule=rule, value=[*shape], where=name)
            found[end] = shape
    return found


def _chain_of(
    nir: Any, item: Projection | LayerProjection, shape: tuple[int, ...], after: tuple[int, ...]
) -> list[Any]:
    """Return the nodes of a projection, in a row."""
    layer = item.synapses
    if isinstance(item, Projection) or len(item.shape) < len(shape):
        layer = nn.Sequential(nn.Flatten(), layer)
    found = nodes_of(nir, layer, shape, item.name)
    given = (item.target_size,) if isinstance(item, Projection) else item.target_shape
    if len(given) != len(after):
        rule = f"one that gives {[*after]}, as others into its target do"
        raise NirError("to_nir", name="projection", rule=rule, value=[*given], where=item.name)
    return found


def _node_of(nir: Any, population: Population, shape: tuple[int, ...]) -> Any:
    """Return the node of an input or of neurons, with one number of each parameter for each neuron."""
    neuron = population.neuron
    if neuron is None:
        return nir.Input(np.array(shape))
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
        values[_nir_name(kind, name)] = (np.zeros(population.size) + array).reshape(shape)
    metadata = {name: getattr(neuron, name) for name in _OPTIONS if hasattr(neuron, name)}
    if (time := getattr(neuron, "t_refractory", None)) is not None:
        metadata["t_refractory"] = time.cpu().double().numpy() if isinstance(time, torch.Tensor) else time
    return getattr(nir, kind)(**values, metadata=metadata)


def _nir_name(kind: str, name: str) -> str:
    return "tau" if name == "tau_mem" and kind != "CubaLIF" else name


# -- import


def from_nir(
    graph: Any,
    *,
    dt: float | None = None,
    reset: Reset | None = None,
    reset_delay: bool | None = None,
    program: str | None = None,
) -> Network:
    """Return the network of a ``nir.NIRGraph``.

    Args:
        graph: Of the nodes Input, Output, Linear, Affine, Conv1d, Conv2d, SumPool2d, AvgPool2d, Scale, Flatten, LIF,
            CubaLIF, LI, IF, Delay, and graphs of these.
        dt: Seconds of a step, in place of the graph's metadata and of what ``program`` takes.
        reset: In place of the metadata; without either ``value``, which is NIR's.
        reset_delay: In place of the metadata; without either False. snnTorch's own default is
            ``reset="subtract", reset_delay=True``, which its export does not state.
        program: Who wrote the graph: ``snntorch``, ``spikingjelly``, ``norse`` or ``sinabs``. What these mean and
            don't state is then as their neurons are by default: the step, resets, the threshold itself, units of time
            constants. A ``NirWarning`` says what can't be known. None for NIR's own meaning.

    Returns:
        A network whose projections are named as the graph's weights; those with a ``q4_format`` train in it. A
        projection that closes a cycle takes one step. Several nodes in a row, or one that is no matrix, are a
        ``LayerProjection``.

    Raises:
        NirError: A node is not one of these, neurons are joined without weights, sizes do not fit, or nobody states
            dt.
    """
    if program not in CONVENTIONS:
        known = ", ".join(str(name) for name in CONVENTIONS)
        raise NirError("from_nir", name="program", rule=f"one of {known}", value=program)
    convention = CONVENTIONS[program]
    step = _dt_of(graph, dt, convention)
    options: dict[str, Any] = {"dt": step, "reset": reset, "reset_delay": reset_delay}
    if convention.lost is not None:
        warnings.warn(convention.lost, NirWarning, stacklevel=2)
    nodes, edges = flattened(graph, "")
    for name, node in nodes.items():
        if type(node).__name__ not in NODES:
            rule = f"one of {', '.join(NODES)}"
            raise NirError("from_nir", name="node", rule=rule, value=type(node).__name__, where=name)
    inputs, filters = {clean(name) for name in graph.inputs}, filters_of(nodes, edges)
    kinds = {name: type(node).__name__ for name, node in nodes.items() if name not in filters}
    ends = [name for name, kind in kinds.items() if name in inputs or kind in _NEURONS]
    paths = [path for name in ends for path in paths_from(name, nodes, edges, options["dt"], filters)]
    layers = _layers_of(paths, nodes)
    shapes = _read_shapes(ends, nodes, paths, layers)
    populations = {
        name: Population(
            name,
            math.prod(shapes[name]),
            _neuron(name, nodes[name], options, convention) if name not in inputs else None,
        )
        for name in ends
    }
    closes = closing(ends, paths)
    projections: list[nn.Module] = []
    names = [_name_of(path, nodes) for path in paths]
    for index, path in enumerate(paths):
        source, target = populations[path.source], populations[path.target]
        name = names[index] if names.count(names[index]) == 1 else f"{names[index]}:{path.source}->{path.target}"
        stated_delay = next((nodes[layer].metadata.get("delay") for layer in path.layers), None)
        delay = path.delay + (index in closes) if stated_delay is None else int(stated_delay)
        layer = layers[index]
        if layer is not None:
            shape = shapes[path.source]
            projections.append(LayerProjection(source, target, layer, shape=shape, delay=delay, name=name))
            _filter(projections, path.filter, nodes, options["dt"])
            continue
        node = nodes[path.matrix(nodes) or ""]
        has_bias = hasattr(node, "bias") and _has_bias(index, paths)
        form = node.metadata.get("q4_format")
        made = Projection(source, target, format=form, delay=delay, bias=has_bias, name=name)
        state = {"weight": torch.from_numpy(numbers(node.weight, np.float32))}
        if has_bias:
            state["bias"] = torch.from_numpy(numbers(node.bias, np.float32))
        made.synapses.load_state_dict(state)
        projections.append(made)
        _filter(projections, path.filter, nodes, options["dt"])
    return Network([*populations.values()], projections)


def _filter(projections: list[nn.Module], name: str | None, nodes: dict[str, Any], dt: float) -> None:
    """Put the time course of an LI around the last projection.

    Raises:
        NirError: It rests elsewhere than at 0, a spike adds other than its weight, or it decays within a step.
    """
    if name is None:
        return
    node, last = nodes[name], cast("Synapses", projections[-1])
    tau, gain, rest = (numbers(value).reshape(-1) for value in (node.tau, node.r, node.v_leak))
    facts = {"v_leak": (rest, rest == 0), "r": (gain, np.abs(gain * dt / tau - 1) <= _ROUNDING), "tau": (tau, tau > dt)}
    for fact, (value, holds) in facts.items():
        if not holds.all():
            rule = f"of synapses, so v_leak is 0, r is tau / dt and tau is above dt, {dt:g} s"
            raise NirError("from_nir", name=fact, rule=rule, value=value[~holds][0], where=name)
    tau_syn = numbers(node.metadata.get("tau_syn", -dt / np.log1p(-dt / tau))).reshape(-1)
    is_one = bool((tau_syn == tau_syn[0]).all())
    given = float(tau_syn[0]) if is_one else torch.from_numpy(tau_syn)
    try:
        projections[-1] = ExpSynapses(last, given, dt=dt)
    except ConfigError as error:
        raise NirError("from_nir", name=error.name, rule=error.rule, value=error.value, where=name) from error


def _dt_of(graph: Any, dt: float | None, convention: Convention) -> float:
    """Return the seconds of a step: as the caller says, the graph, or the program that wrote it."""
    stated = graph.metadata.get("dt") if dt is None else dt
    stated = convention.dt if stated is None else stated
    if stated is None:
        hint = "Or say by program= who wrote it: snntorch, spikingjelly, norse or sinabs."
        raise NirError("from_nir", name="dt", rule="given, as the graph states none", value=None, hint=hint)
    if not 0 < float(stated) < np.inf:
        raise NirError("from_nir", name="dt", rule="above 0 seconds", value=stated)
    return float(stated)


def _has_bias(index: int, paths: Sequence[Path]) -> bool:
    """Return whether a path brings the biases on it: those that earlier ones to the same target do not."""
    path = paths[index]
    return all(p.layers != path.layers or p.target != path.target for p in paths[:index])


def _name_of(path: Path, nodes: dict[str, Any]) -> str:
    """Return the name that a path's nodes state, or that of its matrix, or of all its nodes."""
    stated = {node.metadata.get("projection") for node in (nodes[name] for name in path.layers)}
    if len(stated) == 1 and (name := next(iter(stated))) is not None:
        return str(name)
    return path.matrix(nodes) or "+".join(path.layers)


def _layers_of(paths: Sequence[Path], nodes: dict[str, Any]) -> list[nn.Module | None]:
    """Return the layer of each path; None for those of one matrix."""
    return [
        layer_of(path.layers, nodes, bias=_has_bias(index, paths)) if path.matrix(nodes) is None else None
        for index, path in enumerate(paths)
    ]


def _stated_sizes(name: str, nodes: dict[str, Any], paths: Sequence[Path]) -> set[int]:
    """Return the sizes of a population that the matrices next to it say."""
    sizes = set()
    for path in paths:
        first, last = nodes[path.layers[0]], nodes[path.layers[-1]]
        if path.target == name and type(last).__name__ in MATRICES:
            sizes.add(len(last.weight))
        if path.source == name and type(first).__name__ in MATRICES:
            sizes.add(first.weight.shape[1])
    return sizes


def _read_shapes(
    ends: Sequence[str], nodes: dict[str, Any], paths: Sequence[Path], layers: Sequence[nn.Module | None]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each population: its parameters' if there are many, as its matrices say, or its layers."""
    found: dict[str, tuple[int, ...]] = {}
    own = {name: tuple(int(size) for size in next(iter(nodes[name].input_type.values()))) for name in ends}
    for name in ends:
        sizes = _stated_sizes(name, nodes, paths)
        if math.prod(own[name]) > 1:
            sizes.add(math.prod(own[name]))
        if len(sizes) > 1:
            raise NirError("from_nir", name="size", rule="one", value=sorted(sizes), where=name)
        if sizes:
            found[name] = own[name] if math.prod(own[name]) > 1 else (sizes.pop(),)
    for _ in ends:  # what layers make of shapes that are known
        for path, layer in zip(paths, layers, strict=True):
            if layer is None or path.source not in found:
                continue
            shape = shape_after(layer, found[path.source], path.layers[0])
            if math.prod(found.setdefault(path.target, shape)) != math.prod(shape):
                sizes = {math.prod(found[path.target]), math.prod(shape)}
                raise NirError("from_nir", name="size", rule="one", value=sorted(sizes), where=path.target)
    return {name: found.get(name) or own[name] or (1,) for name in ends}


def _neuron(name: str, node: Any, options: dict[str, Any], convention: Convention) -> Neuron:
    kind, dt = type(node).__name__, options["dt"]
    values: dict[str, Any] = {}
    for field in _FIELDS[kind]:
        array = numbers(getattr(node, _nir_name(kind, field))).reshape(-1)
        is_one = array.size > 0 and bool((array == array[0]).all())
        values[field] = float(array[0]) if is_one else torch.from_numpy(array)
    values = convention.adapted(kind, values, dt)
    for gain, tau in _GAINS.items():
        if gain in values:
            product = torch.as_tensor(values[gain]) * dt / torch.as_tensor(values.get(tau, 1.0))
            if bool(((product - 1).abs() <= _ROUNDING).all()):
                del values[gain]
    for option in _OPTIONS if kind != "LI" else ():
        value = node.metadata.get(option) if options.get(option) is None else options[option]
        value = convention.options.get(option) if value is None else value
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
