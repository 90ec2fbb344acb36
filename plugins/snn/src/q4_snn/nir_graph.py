"""Graphs of NIR: paths between populations, their delays, and the sizes of populations."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from q4core import InputError

__all__ = ["NEURONS", "NODES", "NirError", "Path", "clean", "closing", "flattened", "paths_from", "sizes_of"]

NEURONS = ("LIF", "CubaLIF", "LI", "IF")
_WEIGHTS = ("Linear", "Affine")
NODES = (*NEURONS, *_WEIGHTS, "Delay", "Flatten", "Input", "Output")
"""Kinds of nodes that can be read."""


class NirError(InputError, code="nir"):
    """A graph can't be a network, or a network no graph; ``where`` names node or population."""


@attrs.frozen
class Path:
    """A path from one population to another: one node of weights, and delays in steps."""

    source: str
    target: str
    weight: str
    delay: int


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


def paths_from(source: str, nodes: dict[str, Any], edges: list[tuple[str, str]], dt: float) -> list[Path]:
    """Return what leads from a population to others."""
    found = []
    left: list[tuple[str, str | None, int, tuple[str, ...]]] = [
        (target, None, 0, ()) for start, target in edges if start == source
    ]
    while left:
        name, weight, delay, way = left.pop(0)
        if name in way:
            raise NirError("from_nir", name="edge", rule="free of cycles without neurons", value=way, where=name)
        kind = type(nodes[name]).__name__
        if kind in NEURONS:
            if weight is None:
                raise NirError(
                    "from_nir", name="edge", rule="by way of a Linear or Affine node", where=name, value=source
                )
            found.append(Path(source, name, weight, delay))
            continue
        if kind in _WEIGHTS:
            if weight is not None:
                rule = "followed by neurons, not by weights again"
                raise NirError("from_nir", name="node", rule=rule, value=weight, where=name)
            if nodes[name].weight.ndim != 2:  # noqa: PLR2004  # a matrix
                raise NirError("from_nir", name="weight", rule="a matrix", value=nodes[name].weight.shape, where=name)
            rows, bias = len(nodes[name].weight), getattr(nodes[name], "bias", None)
            if bias is not None and np.shape(bias) != (rows,):
                raise NirError("from_nir", name="bias", rule=f"of shape [{rows}]", value=np.shape(bias), where=name)
            weight = name
        elif kind == "Delay":
            delay += _steps(name, nodes[name].delay, dt)
        left += [(target, weight, delay, (*way, name)) for start, target in edges if start == name]
    return found


def _steps(name: str, delay: Any, dt: float) -> int:
    steps = np.asarray(delay, np.float64).reshape(-1) / dt
    whole = round(float(steps[0])) if steps.size and np.isfinite(steps).all() else -1
    if whole < 0 or not np.allclose(steps, whole, rtol=0, atol=1e-3):
        rule = f"one whole number of steps of {dt:g} s for all neurons"
        raise NirError("from_nir", name="delay", rule=rule, value=delay, where=name)
    return whole


def sizes_of(ends: list[str], nodes: dict[str, Any], paths: list[Path]) -> dict[str, int]:
    """Return the number of neurons of each population: as its weights say, and its parameters if there are many."""
    found: dict[str, int] = {}
    for name in ends:
        node = nodes[name]
        own = int(np.prod(next(iter(node.input_type.values())), dtype=np.int64))
        sizes = {nodes[p.weight].weight.shape[0] for p in paths if p.target == name}
        sizes |= {nodes[p.weight].weight.shape[1] for p in paths if p.source == name}
        if not sizes or own > 1:
            sizes.add(own)
        if len(sizes) != 1:
            raise NirError("from_nir", name="size", rule="one", value=sorted(sizes), where=name)
        found[name] = sizes.pop()
    return found


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
