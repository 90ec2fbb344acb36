"""The graph of an ONNX model: its operators and initializers, those of nested graphs too.

Reference:
    onnx.proto of ONNX 1.23: ModelProto, GraphProto, NodeProto, AttributeProto.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from q4_onnx.tensors import read_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_onnx.tensors import Tensor
    from q4_onnx.wire import Field, Wire

__all__ = ["Model", "Node", "graph_of", "read_model"]

_GRAPH, _OPSETS, _PROPERTIES = 7, 8, 14
_TEXTS = {2: "producer_name", 3: "producer_version", 4: "domain"}
_NUMBERS = {1: "ir_version", 5: "model_version"}
_MESSAGES = frozenset({2, 3, 4, 6, _GRAPH, _OPSETS, _PROPERTIES, 20, 25, 26})
"""Fields of a model that hold bytes."""
_KEY, _TEXT = 1, 2
_NODE, _INITIALIZER = 1, 5
_ATTRIBUTE = 5
_ATTRIBUTE_NAME, _WHOLE, _GRAPHS = 1, 3, frozenset({6, 11})
_MOST_NAMED = 20
_MOST_NESTED = 16
_MOST_ITEMS = 1_000_000
"""Nodes, and initializers, of a model."""


class Node(NamedTuple):
    """One operator.

    Args:
        name: Its name, which may be empty.
        operator: The operator's name.
        domain: The operator's domain; empty for ONNX's own.
        inputs: Names of its inputs; empty where one is left out.
        outputs: Names of its outputs.
        numbers: Whole numbers among its attributes, by name.
    """

    name: str
    operator: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: dict[str, int]


class Model:
    """What a model holds: properties as texts, nodes, and initializers by name."""

    def __init__(self) -> None:
        self.properties: dict[str, str] = {}
        self.nodes: list[Node] = []
        self.tensors: dict[str, Tensor] = {}
        self.doubled: list[str] = []
        self.graphs = 0


def graph_of(wire: Wire) -> tuple[int, int]:
    """Return the place of the graph in a model.

    Raises:
        CheckpointError: These are no fields of a model, or there is no graph, or several.
    """
    found = None
    for field in wire.fields(0, wire.size, "model"):
        if field.number not in _MESSAGES and field.number not in _NUMBERS:
            wire.fail("model", "of fields that ONNX defines", field.number)
        if field.number == _GRAPH:
            if found is not None:
                wire.fail("model", "of one graph", "several")
            found = wire.span(field, "graph")
    if found is None:
        wire.fail("model", "of a graph", "none")
    return found


def read_model(wire: Wire) -> Model:
    """Read what a model says, without the elements of its tensors.

    Raises:
        CheckpointError: Something is malformed; the message names file, field, rule and value.
    """
    model, place = Model(), graph_of(wire)
    for field in wire.fields(0, wire.size, "model"):
        if field.number in _TEXTS:
            model.properties[_TEXTS[field.number]] = wire.text(field, _TEXTS[field.number])
        elif field.number in _NUMBERS:
            model.properties[_NUMBERS[field.number]] = str(wire.whole(field, _NUMBERS[field.number]))
        elif field.number == _PROPERTIES:
            model.properties |= _property(wire, *wire.span(field, "metadata_props"))
    _read_graph(wire, place, model, 0)
    if model.doubled:
        names = ", ".join(repr(name) for name in model.doubled[:_MOST_NAMED])
        wire.fail("initializer names", "unique and not empty", f"{names}{', …' * (len(model.doubled) > _MOST_NAMED)}")
    return model


def _property(wire: Wire, start: int, end: int) -> dict[str, str]:
    key, text = "", ""
    for field in wire.fields(start, end, "metadata_props"):
        if field.number == _KEY:
            key = wire.text(field, "key in metadata_props")
        elif field.number == _TEXT:
            first, last = wire.span(field, "metadata_props")
            text = bytes(wire.data[first:last]).decode("utf-8", "replace")
    return {key: text}


def _read_graph(wire: Wire, place: tuple[int, int], model: Model, depth: int) -> None:
    """Add the nodes and initializers of a graph, and of the graphs in its nodes' attributes."""
    if depth > _MOST_NESTED:
        wire.fail("graph", f"nested at most {_MOST_NESTED} deep", "deeper")
    model.graphs += 1
    number, first, own = model.graphs, len(model.nodes), dict[str, "Tensor"]()
    for field in wire.fields(*place, "graph"):
        if field.number == _NODE:
            _read_node(wire, wire.span(field, "node"), model, depth)
        elif field.number == _INITIALIZER:
            tensor = read_tensor(wire, *wire.span(field, "initializer"))
            if not tensor.name or tensor.name in own:
                model.doubled.append(tensor.name)
            own[tensor.name] = tensor
        if max(len(model.nodes), len(model.tensors) + len(own), len(model.doubled)) > _MOST_ITEMS:
            wire.fail("graph", f"of at most {_MOST_ITEMS} nodes and initializers", "more")
    _take(own, model, first, f"#{number}" if depth else "")


def _take(own: dict[str, Tensor], model: Model, first: int, mark: str) -> None:
    """Add a graph's initializers. Two branches of an If may use the same names: those of the second one are marked."""
    renamed = {name: f"{name}{mark}" for name in own.keys() & model.tensors.keys()}
    if renamed:
        for index, node in enumerate(model.nodes[first:], first):
            inputs = tuple(renamed.get(name, name) for name in node.inputs)
            model.nodes[index] = Node(*node[:3], inputs, *node[4:])
    for name, tensor in own.items():
        key = renamed.get(name, name)
        if key in model.tensors:
            model.doubled.append(name)
        model.tensors[key] = tensor


def _read_node(wire: Wire, place: tuple[int, int], model: Model, depth: int) -> None:
    texts = {3: "", 4: "", 7: ""}
    names: dict[int, list[str]] = {1: [], 2: []}
    numbers: dict[str, int] = {}
    for field in wire.fields(*place, "node"):
        if field.number in names:
            names[field.number].append(wire.text(field, "node input or output"))
        elif field.number in texts:
            texts[field.number] = wire.text(field, "node name, op_type or domain")
        elif field.number == _ATTRIBUTE:
            key = ""
            for part in _attribute(wire, field):
                if part.number == _ATTRIBUTE_NAME:
                    key = wire.text(part, "attribute name")
                elif part.number == _WHOLE:
                    numbers[key] = wire.whole(part, "attribute")
                elif part.number in _GRAPHS:
                    _read_graph(wire, wire.span(part, "graph in an attribute"), model, depth + 1)
    model.nodes.append(Node(texts[3], texts[4], texts[7], tuple(names[1]), tuple(names[2]), numbers))


def _attribute(wire: Wire, field: Field) -> Iterator[Field]:
    """Yield the fields of an attribute, its name first, wherever that is stored."""
    parts = list(wire.fields(*wire.span(field, "attribute"), "attribute"))
    return iter(sorted(parts, key=lambda part: part.number != _ATTRIBUTE_NAME))
