"""``Reader`` plugin: recognises ONNX files and returns one weight or tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from q4_onnx.examples import make_file
from q4_onnx.layers import READ, layer_of, packed_inputs, weight_of
from q4_onnx.model import graph_of, read_model
from q4_onnx.tensors import NARROW, map_file, view_of
from q4_onnx.wire import DAMAGED, Wire
from q4core import CheckpointError, DialectError, LayerSchema, LifecycleError, Problem, Schema, TensorInfo
from q4core.plugin_api import open_regular, require_regular

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Mapping

    import torch

    from q4_onnx.model import Model
    from q4_onnx.tensors import Tensor
    from q4core import OpenRequest, PackedWeight

__all__ = ["OnnxReader", "OnnxSource"]

_SUFFIX = ".onnx"
_FIRST = b"\x08"
"""The first byte of all writers: the tag of ``ir_version``."""
_RESHAPING = frozenset({"Reshape", "Identity"})
_MOST_RESHAPED = 4
_MOST_FILES = 4096
_DOMAIN = "com.microsoft"


class OnnxSource:
    """One open ONNX file, with the files of external data that it names.

    The initializers of a ``MatMulNBits`` or ``GatherBlockQuantized`` node are a layer. Byte matrices of other operators
    are listed as packed data that is not read; every other initializer is dense, under its own name.

    Args:
        path: The model.
        copy: Read whole files into memory instead of mapping them.

    Raises:
        CheckpointError: It can't be read, something in it is malformed, or a file of external data is missing.
    """

    def __init__(self, path: Path, *, copy: bool = False) -> None:
        self._path, self._copy = path, copy
        wire = Wire(map_file(path, copy=copy), str(path))
        self._files: dict[str | None, mmap.mmap | bytes] | None = {None: wire.data}
        self._model = read_model(wire)
        _check_places(wire, self._model)
        self._metadata = self._model.properties
        layers, unsupported, refused = self._layers()
        self._check_names(layers)
        packed = {key for layer in layers for key in layer.keys.values()} | refused
        unread = {problem.key: problem for problem in (*unsupported, *_unread(self._model, packed))}
        self._schema = Schema(
            layers={layer.module: layer for layer in layers},
            dense=tuple(name for name in self._model.tensors if name not in packed and name not in unread),
            unsupported=tuple(unread.values()),
        )
        self._dense = {
            name: TensorInfo(tensor.dtype, tensor.shape)
            for name in self._schema.dense
            if (tensor := self._model.tensors[name]).dtype is not None
        }

    @property
    def path(self) -> Path:
        """The model's file."""
        return self._path

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The model's properties, as texts."""
        return self._metadata

    @property
    def schema(self) -> Schema:
        """The layers, the dense tensors, and the packed data that is not read."""
        return self._schema

    @property
    def dense(self) -> Mapping[str, TensorInfo]:
        """dtype and shape of each dense tensor."""
        return self._dense

    def _layers(self) -> tuple[list[LayerSchema], list[Problem], set[str]]:
        """Return the layers of all nodes, each set of initializers once, and why others can't be read, with theirs."""
        sources = {
            node.outputs[0]: node.inputs[0]
            for node in self._model.nodes
            if node.operator in _RESHAPING and node.inputs and node.outputs
        }

        def origin(name: str) -> str:
            for _ in range(_MOST_RESHAPED):
                if name in self._model.tensors or name not in sources:
                    break
                name = sources[name]
            return name

        found: dict[tuple[str, ...], LayerSchema] = {}
        problems, refused = [], set()
        for node in self._model.nodes:
            if node.operator in READ and node.domain == _DOMAIN:
                item = layer_of(node, self._model, origin, self.load)
                if isinstance(item, Problem):
                    problems.append(item)
                    refused |= {name for name in map(origin, packed_inputs(node)) if name in self._model.tensors}
                else:
                    found.setdefault((*item.keys.values(), str(item.shape), str(item.block_size)), item)
        return _with_own_names(list(found.values())), problems, refused

    def _check_names(self, layers: list[LayerSchema]) -> None:
        seen: set[str] = set()
        for layer in layers:
            if layer.module in seen:
                rule = "unique, as are the names of its codes"
                raise CheckpointError("ONNX file", name="layer", rule=rule, value=layer.module, where=str(self._path))
            seen.add(layer.module)

    def read(self, module: str) -> PackedWeight:
        """Return one layer's weight: codes and scales as views of the file."""
        return weight_of(self._schema.layers[module], self.load)

    def load(self, name: str) -> torch.Tensor:
        """Return one initializer as a view of its file; a copy where it is not aligned there.

        Raises:
            CheckpointError: The file of external data ends before it.
            LifecycleError: The source is closed.
        """
        tensor = self._model.tensors[name]
        if self._files is None:
            raise LifecycleError("ONNX file", name="file", rule="open", value="closed", where=str(self._path))
        if tensor.location not in self._files:
            self._files[tensor.location] = map_file(_next_to(self._path, tensor.location), copy=self._copy)
        data = self._files[tensor.location]
        where = str(self._path if tensor.location is None else _next_to(self._path, tensor.location))
        if tensor.position + tensor.nbytes > len(data):
            _outside(tensor, len(data), where)
        return view_of(data, tensor, where)

    def close(self) -> None:
        """Release the mappings, which last as long as views of them; weights already returned stay valid."""
        self._files = None


class OnnxReader:
    """Opens ONNX files."""

    name = "onnx"
    make_file = staticmethod(make_file)

    def recognises(self, path: Path) -> bool:
        """Return whether the path is a file of ONNX's fields, or one called ``.onnx`` that starts like it."""
        try:
            with open_regular(path) as file:
                head = file.read(9)
            if head[:1] != _FIRST or head[8:] == b"{":
                return False
            if path.suffix == _SUFFIX:
                return True
            graph_of(Wire(map_file(path), str(path)))
        except (OSError, CheckpointError):
            return False
        return True

    def open(self, path: Path, request: OpenRequest) -> OnnxSource:
        """Open a model.

        Raises:
            CheckpointError: It is malformed, or a file of external data is missing; the message names file, field, rule
                and value.
            DialectError: An option was given; this reader has none.
        """
        for option in request.options or {}:
            rule = "absent: the reader of ONNX files has none"
            raise DialectError("options", name="option", rule=rule, value=option, where=str(path))
        return OnnxSource(path, copy=request.copy)


def _next_to(path: Path, location: str | None) -> Path:
    return path.parent / (location or "")


def _outside(tensor: Tensor, size: int, where: str) -> None:
    rule = f"within the file's {size} bytes"
    value = f"{tensor.nbytes} bytes from {tensor.position}"
    name = f"initializer {tensor.name!r} external_data"
    raise CheckpointError("ONNX file", name=name, rule=rule, value=value, where=where, hint=DAMAGED)


def _check_places(wire: Wire, model: Model) -> None:
    """Check that each initializer in another file lies within it; the file is not opened."""
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        if tensor.location is None:
            continue
        if tensor.location not in sizes:
            if len(sizes) == _MOST_FILES:
                wire.fail("external_data", f"in at most {_MOST_FILES} files", "more")
            path = _next_to(Path(wire.where), tensor.location)
            require_regular(path)
            sizes[tensor.location] = path.stat().st_size
        if tensor.position + tensor.nbytes > sizes[tensor.location]:
            _outside(tensor, sizes[tensor.location], str(_next_to(Path(wire.where), tensor.location)))


def _with_own_names(layers: list[LayerSchema]) -> list[LayerSchema]:
    """Return layers with the whole names of their codes where two would have the same."""
    count: dict[str, int] = {}
    for layer in layers:
        count[layer.module] = count.get(layer.module, 0) + 1
    return [attrs.evolve(item, module=item.keys["qdata"]) if count[item.module] > 1 else item for item in layers]


def _unread(model: Model, packed: set[str]) -> Iterator[Problem]:
    """Yield the byte matrices that no layer has, with the operator that they belong to, and tensors of other types."""
    users: dict[str, str] = {}
    for node in model.nodes:
        for name in node.inputs:
            users.setdefault(name, node.operator)
    for name, tensor in model.tensors.items():
        is_matrix = len(tensor.shape) > 1
        if name in packed or (tensor.dtype is not None and not (is_matrix and tensor.type_number in NARROW)):
            continue
        rule = f"dense, or packed for {' or '.join(READ)}"
        yield Problem("unsupported", name, rule, f"{tensor.type_name} of {users.get(name, 'no operator')}")
