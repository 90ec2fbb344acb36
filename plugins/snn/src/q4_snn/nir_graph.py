"""Graphs of NIR: paths between populations, their delays, and the sizes of populations."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from q4core import InputError, Q4Warning

__all__ = [
    "MATRICES",
    "NEURONS",
    "NODES",
    "NirError",
    "NirWarning",
    "Path",
    "clean",
    "closing",
    "filters_of",
    "flattened",
    "numbers",
    "paths_from",
]

NEURONS = ("LIF", "CubaLIF", "LI", "IF")
MATRICES = ("Linear", "Affine")
_LAYERS = (*MATRICES, "Conv1d", "Conv2d", "SumPool2d", "AvgPool2d", "Scale")
NODES = (*NEURONS, *_LAYERS, "Delay", "Flatten", "Input", "Output")
"""Kinds of nodes that can be read."""


class NirError(InputError, code="nir"):
    """A graph can't be a network, or a network no graph; ``where`` names node or population."""


class NirWarning(Q4Warning):
    """Something of a network is not what other programs read in its graph, or of a graph not what the network does."""


@attrs.frozen
class Path:
    """A path from one population to another: nodes without a state, delays in steps, and an LI that filters."""

    source: str
    target: str
    layers: tuple[str, ...]
    delay: int
    filter: str | None = None

    def matrix(self, nodes: dict[str, Any]) -> str | None:
        """Return the matrix that is all that is on the way, but for what flattens; None for any other way."""
        names = [name for name in self.layers if type(nodes[name]).__name__ != "Flatten"]
        return names[0] if len(names) == 1 and type(nodes[names[0]]).__name__ in MATRICES else None


def numbers(value: Any, dtype: type[np.floating[Any]] = np.float64) -> np.ndarray[Any, Any]:
    """Return an array, or a tensor as some programs export them, as an array of its own."""
    return np.array(value.detach().cpu().numpy() if hasattr(value, "detach") else value, dtype)


def clean(name: str) -> str:
    """Return a name that a module may have; colons take the place of dots and slashes."""
    return name.replace(".", ":").replace("/", ":")


def flattened(graph: Any, prefix: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return nodes and edges, those of inner graphs instead of the graphs themselves."""
    nodes: dict[str, Any] = {}
    edges: list[tuple[str, str]] = []
    enters, leaves = {}, {}
    for name, node in graph.nodes.items():
        full = prefix + clean(name)
        enters[name], leaves[name] = [full], [full]
        if type(node).__name__ == "NIRGraph":
            inner, joined = flattened(node, f"{full}:")
            enters[name], leaves[name] = (
                [f"{full}:{clean(end)}" for end in ends] for ends in (node.inputs, node.outputs)
            )
            nodes |= inner
            edges += joined
        else:
            nodes[full] = node
    for edge in graph.edges:
        if unknown := {*edge} - {*graph.nodes}:
            raise NirError("from_nir", name="edge", rule="between nodes of the graph", value=edge, where=min(unknown))
    edges += [(a, b) for source, target in graph.edges for a in leaves[source] for b in enters[target]]
    return nodes, edges


def filters_of(nodes: dict[str, Any], edges: list[tuple[str, str]]) -> set[str]:
    """Return the LI nodes that give their currents to neurons without weights: these are synapses, not populations."""
    kinds = {name: type(node).__name__ for name, node in nodes.items()}
    after = {name: {kinds[target] for start, target in edges if start == name} for name in nodes}
    return {name for name, kind in kinds.items() if kind == "LI" and after[name] and after[name] <= {*NEURONS} - {"LI"}}


def paths_from(
    source: str, nodes: dict[str, Any], edges: list[tuple[str, str]], dt: float, filters: set[str]
) -> list[Path]:
    """Return what leads from a population to others."""
    found = []
    left: list[tuple[str, tuple[str, ...], int, tuple[str, ...], str | None]] = [
        (target, (), 0, (), None) for start, target in edges if start == source
    ]
    while left:
        name, layers, delay, way, filtered = left.pop(0)
        if name in way:
            raise NirError("from_nir", name="edge", rule="free of cycles without neurons", value=way, where=name)
        kind = type(nodes[name]).__name__
        if name in filters and filtered is None:
            filtered = name
        elif kind in NEURONS:
            if all(type(nodes[layer]).__name__ == "Flatten" for layer in layers):
                rule = "by way of a node of weights, or of pooling or scale"
                raise NirError("from_nir", name="edge", rule=rule, where=name, value=source)
            found.append(Path(source, name, layers, delay, filtered))
            continue
        if kind in MATRICES:
            _check_matrix(name, nodes[name])
        if kind in _LAYERS or kind == "Flatten":
            layers = (*layers, name)
        elif kind == "Delay":
            delay += _steps(name, nodes[name].delay, dt)
        left += [(target, layers, delay, (*way, name), filtered) for start, target in edges if start == name]
    return found


def _check_matrix(name: str, node: Any) -> None:
    """Refuse a node whose weight is no matrix, or whose bias is of another size."""
    if node.weight.ndim != 2:  # noqa: PLR2004  # a matrix
        raise NirError("from_nir", name="weight", rule="a matrix", value=node.weight.shape, where=name)
    rows, bias = len(node.weight), getattr(node, "bias", None)
    if bias is not None and np.shape(bias) != (rows,):
        raise NirError("from_nir", name="bias", rule=f"of shape [{rows}]", value=np.shape(bias), where=name)


def _steps(name: str, delay: Any, dt: float) -> int:
    steps = numbers(delay).reshape(-1) / dt
    whole = round(float(steps[0])) if steps.size and np.isfinite(steps).all() else -1
    if whole < 0 or not np.allclose(steps, whole, rtol=0, atol=1e-3):
        rule = f"one whole number of steps of {dt:g} s for all neurons"
        raise NirError("from_nir", name="delay", rule=rule, value=delay, where=name)
    return whole


def closing(ends: list[str], paths: list[Path]) -> set[int]:
    """Return the paths that close a cycle, as one walks from the inputs."""
    found: set[int] = set()
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        for index, path in enumerate(paths):
            if path.source == name:
                if path.target in above:
                    found.add(index)
                elif path.target not in done:
                    walk(path.target, (*above, path.target))
        done.add(name)

    for name in ends:
        if name not in done:
            walk(name, (name,))
    return found
