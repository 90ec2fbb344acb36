"""``Reader`` plugin: recognises GGUF files and returns one weight or tensor at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_gguf.examples import make_file, make_parts
from q4_gguf.ggml import DENSE_TYPES, PACKED_TYPES, UNPACKED_TYPES
from q4_gguf.split import read_parts
from q4_gguf.views import dense_tensor, outline, packed_weight, unpacked_tensor
from q4core import CheckpointError, DialectError, LayerSchema, LifecycleError, Problem, Schema, TensorInfo
from q4core.plugin_api import open_regular

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from q4_gguf.header import TensorEntry
    from q4core import OpenRequest, PackedWeight

__all__ = ["GgufReader", "GgufSource"]

_SUFFIX, _FACTOR = ".weight", ".scale"
_DEQUANTIZE = "dequantize"
_MAX_EXPERTS = 4096


class GgufSource:
    """One open GGUF file, or all parts of a split model.

    A packed tensor ``name.weight`` is the layer ``name``; one of E experts, of shape [E, N, K], is the layers
    ``name.0`` … ``name.E-1``. A float32 tensor ``name.scale`` next to one of type NVFP4 is its global scale. Every
    other tensor is dense, under its own name.

    Args:
        path: The file, or any part.
        copy: Read whole files into memory instead of mapping them.
        dequantize: Read tensors of ``UNPACKED_TYPES`` as dense float32 ones.

    Raises:
        CheckpointError: It can't be read, its header is malformed, or a part of the model is missing.
    """

    def __init__(self, path: Path, *, copy: bool = False, dequantize: bool = False) -> None:
        parts = read_parts(path, copy=copy)
        self._path = parts[0].path
        self._metadata = parts[0].header.metadata
        self._entries: dict[str, TensorEntry] = {}
        self._data: dict[str, mmap.mmap] | None = {}
        for part in parts:
            self._entries.update(part.header.tensors)
            self._data.update(dict.fromkeys(part.header.tensors, part.data))
        self._factors: dict[str, str] = {}
        layers: dict[str, LayerSchema] = {}
        dense: dict[str, TensorInfo] = {}
        unsupported: list[Problem] = []
        for entry in self._entries.values():
            problem = refusal(entry, dequantize=dequantize) or self._note_factor(entry)
            if problem is not None:
                unsupported.append(problem)
            elif entry.type_name in PACKED_TYPES:
                for layer in _layers(entry, self._factors.get(entry.name)):
                    if layer.module in layers:
                        rule, where = "unique, experts and suffixes apart", str(self._path)
                        raise CheckpointError("GGUF file", name="layer", rule=rule, value=layer.module, where=where)
                    layers[layer.module] = layer
            else:
                dense[entry.name] = TensorInfo(DENSE_TYPES.get(entry.type_name, torch.float32), entry.shape)
        for name in self._factors.values():
            dense.pop(name, None)
        self._dense = dense
        self._schema = Schema(layers=layers, dense=tuple(dense), unsupported=tuple(unsupported))

    @property
    def path(self) -> Path:
        """The file; of a split model the first part."""
        return self._path

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key → int, float, bool, str, or a lazy sequence of these; of a split model those of the first part."""
        return self._metadata

    @property
    def schema(self) -> Schema:
        """The layers, the dense tensors, and the tensors of types that are not read."""
        return self._schema

    @property
    def dense(self) -> Mapping[str, TensorInfo]:
        """dtype and shape of each dense tensor."""
        return self._dense

    def _note_factor(self, entry: TensorEntry) -> Problem | None:
        """Note the tensor with the global scale of an NVFP4 one, or say what is wrong with it."""
        module = entry.name.removesuffix(_SUFFIX)
        name = module + _FACTOR
        factor = self._entries.get(name)
        if entry.type_name != "NVFP4" or factor is None:
            return None
        count = entry.shape[0] if len(entry.shape) > 2 else 1  # noqa: PLR2004  # [E, N, K]
        if (factor.type_name, factor.shape) != ("F32", (count,)):
            rule, value = f"with its global scale {name} of F32 [{count}]", f"{factor.type_name} {[*factor.shape]}"
            return Problem("unsupported", module, rule, value)
        self._factors[entry.name] = name
        return None

    def _bytes_of(self, name: str) -> mmap.mmap:
        if self._data is None:
            raise LifecycleError("GGUF file", name="file", rule="open", value="closed", where=str(self._path))
        return self._data[name]

    def read(self, module: str) -> PackedWeight:
        """Return one layer's weight: strided views of the file, but for codes that are packed again."""
        layer = self._schema.layers[module]
        entry = self._entries[layer.keys["qdata"]]
        expert = dict(layer.extras).get("expert")
        factor = None
        if entry.name in self._factors:
            factor = self.load(self._factors[entry.name])[expert or 0]
        return packed_weight(self._bytes_of(entry.name), entry, name=module, expert=expert, factor=factor)

    def peek(self, module: str) -> PackedWeight:
        """Return a layer's weight with the first row in place of all others, at no cost, for reports of files."""
        entry = self._entries[self._schema.layers[module].keys["qdata"]]
        factor = torch.ones(()) if entry.name in self._factors else None
        return outline(self._bytes_of(entry.name), entry, name=module, factor=factor)

    def load(self, name: str) -> torch.Tensor:
        """Return one dense tensor, as a view of the file; float32 values where they are computed on request."""
        entry, data = self._entries[name], self._bytes_of(name)
        return dense_tensor(data, entry) if entry.type_name in DENSE_TYPES else unpacked_tensor(data, entry)

    def close(self) -> None:
        """Release the mapping, which lasts as long as a view of it; weights already returned stay valid."""
        self._data = None


class GgufReader:
    """Opens GGUF files."""

    name = "gguf"
    make_file = staticmethod(make_file)
    make_parts = staticmethod(make_parts)

    def recognises(self, path: Path) -> bool:
        """Return whether the path is a file that starts with ``GGUF``."""
        try:
            with open_regular(path) as file:
                return file.read(4) == b"GGUF"
        except (OSError, CheckpointError):
            return False

    def open(self, path: Path, request: OpenRequest) -> GgufSource:
        """Open a file, or all parts of a split model.

        Raises:
            CheckpointError: It is malformed, or a part of the model is missing; the message names file, key, rule and
                value.
            DialectError: An option was given that this reader does not have.
        """
        options = dict(request.options or {})
        dequantize = options.pop(_DEQUANTIZE, False)
        for option in options:
            rule = f"{_DEQUANTIZE!r} for a GGUF file"
            raise DialectError("options", name="option", rule=rule, value=option, where=str(path))
        if not isinstance(dequantize, bool):
            rule = "True or False"
            raise DialectError("options", name=_DEQUANTIZE, rule=rule, value=dequantize, where=str(path))
        return GgufSource(path, copy=request.copy, dequantize=dequantize)


def refusal(entry: TensorEntry, *, dequantize: bool = False) -> Problem | None:
    """Return why a tensor can't be read, or None where it can."""

    def unsupported(rule: str, value: object) -> Problem:
        return Problem("unsupported", entry.name.removesuffix(_SUFFIX), rule, value)

    if entry.type_name in UNPACKED_TYPES:
        rule = f"of a type that has packed kernels; options={{{_DEQUANTIZE!r}: True}} reads it as dense float32"
        return None if dequantize else unsupported(rule, entry.type_name)
    if entry.type is None or not entry.type.served:
        return unsupported(
            f"of a ggml type that dialect gguf reads ({', '.join((*PACKED_TYPES, *DENSE_TYPES))})", entry.type_name
        )
    if entry.type_name not in PACKED_TYPES:
        return None
    if len(entry.shape) not in {2, 3}:
        return unsupported("of 2 dimensions, or of 3 for experts", list(entry.shape))
    if len(entry.shape) == 3 and entry.shape[0] > _MAX_EXPERTS:  # noqa: PLR2004  # [E, N, K]
        return unsupported(f"of at most {_MAX_EXPERTS} experts", entry.shape[0])
    return None


def _layers(entry: TensorEntry, factor: str | None) -> Iterator[LayerSchema]:
    """Yield the one layer of a matrix, or one for each expert."""
    *experts, rows, columns = entry.shape
    count = experts[0] if experts else 1
    name, layout = entry.name.removesuffix(_SUFFIX), PACKED_TYPES[entry.type_name]
    keys = dict.fromkeys(("qdata", *layout.parts), entry.name)
    for index in range(count):
        yield LayerSchema(
            module=f"{name}.{index}" if experts else name,
            dialect="gguf",
            format=layout.format,
            keys=keys if factor is None else keys | {"global_scale": factor},
            shape=(rows, columns),
            block_size=layout.block_size,
            extras=(("type", entry.type_name), *([("expert", index)] if experts else [])),
            nbytes=(entry.nbytes or 0) // count,
        )
