"""``Reader`` plugin: recognises GGUF files and returns one weight or tensor at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_gguf.ggml import DENSE_TYPES, PACKED_TYPES
from q4_gguf.header import read_header
from q4_gguf.split import require_whole
from q4_gguf.views import dense_tensor, map_file, packed_weight
from q4core import CheckpointError, DialectError, LayerSchema, LifecycleError, Problem, Schema, TensorInfo
from q4core.plugin_api import open_regular

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from q4_gguf.header import TensorEntry
    from q4core import OpenRequest, PackedWeight

__all__ = ["GgufReader", "GgufSource"]

_SUFFIX = ".weight"
_MAX_EXPERTS = 4096


class GgufSource:
    """One open GGUF file.

    A packed tensor ``name.weight`` is the layer ``name``; one of E experts, of shape [E, N, K], is the layers
    ``name.0`` … ``name.E-1``. Every other tensor is dense, under its own name.

    Args:
        path: The file.
        copy: Read the whole file into memory instead of mapping it.

    Raises:
        CheckpointError: It can't be read, its header is malformed, or it is one part of a split model.
    """

    def __init__(self, path: Path, *, copy: bool = False) -> None:
        self._path = path
        self._data: mmap.mmap | None = map_file(path, copy=copy)
        self._header = read_header(self._data, str(path))
        require_whole(self._header, path)
        layers: dict[str, LayerSchema] = {}
        dense: dict[str, TensorInfo] = {}
        unsupported: list[Problem] = []
        for entry in self._header.tensors.values():
            problem = refusal(entry)
            if problem is not None:
                unsupported.append(problem)
            elif entry.type_name in PACKED_TYPES:
                layers.update((layer.module, layer) for layer in _layers(entry))
            else:
                dense[entry.name] = TensorInfo(DENSE_TYPES[entry.type_name], entry.shape)
        self._dense = dense
        self._schema = Schema(layers=layers, dense=tuple(dense), unsupported=tuple(unsupported))

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key → int, float, bool, str, or a lazy sequence of these."""
        return self._header.metadata

    @property
    def schema(self) -> Schema:
        """The layers, the dense tensors, and the tensors of types that are not read."""
        return self._schema

    @property
    def dense(self) -> Mapping[str, TensorInfo]:
        """dtype and shape of each dense tensor."""
        return self._dense

    def _require_data(self) -> mmap.mmap:
        if self._data is None:
            raise LifecycleError("GGUF file", name="file", rule="open", value="closed", where=str(self._path))
        return self._data

    def read(self, module: str) -> PackedWeight:
        """Return one layer's weight; codes, scales and offsets are strided views of the file."""
        layer = self._schema.layers[module]
        entry = self._header.tensors[layer.keys["qdata"]]
        expert = dict(layer.extras).get("expert")
        return packed_weight(self._require_data(), entry, name=module, expert=expert)

    def load(self, name: str) -> torch.Tensor:
        """Return one dense tensor, as a view of the file."""
        return dense_tensor(self._require_data(), self._header.tensors[name])

    def close(self) -> None:
        """Release the mapping, which lasts as long as a view of it; weights already returned stay valid."""
        self._data = None


class GgufReader:
    """Opens GGUF files."""

    name = "gguf"

    def recognises(self, path: Path) -> bool:
        """Return whether the path is a file that starts with ``GGUF``."""
        try:
            with open_regular(path) as file:
                return file.read(4) == b"GGUF"
        except (OSError, CheckpointError):
            return False

    def open(self, path: Path, request: OpenRequest) -> GgufSource:
        """Open a file.

        Raises:
            CheckpointError: It is malformed, or one part of a split model; the message names file, key, rule and value.
            DialectError: An option was given; this reader has none.
        """
        for option in request.options or ():
            raise DialectError("options", name="option", rule="none for a GGUF file", value=option, where=str(path))
        return GgufSource(path, copy=request.copy)


def refusal(entry: TensorEntry) -> Problem | None:
    """Return why a tensor can't be read, or None where it can."""

    def unsupported(rule: str, value: object) -> Problem:
        return Problem("unsupported", entry.name.removesuffix(_SUFFIX), rule, value)

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


def _layers(entry: TensorEntry) -> Iterator[LayerSchema]:
    """Yield the one layer of a matrix, or one for each expert."""
    *experts, rows, columns = entry.shape
    count = experts[0] if experts else 1
    name = entry.name.removesuffix(_SUFFIX)
    for index in range(count):
        yield LayerSchema(
            module=f"{name}.{index}" if experts else name,
            dialect="gguf",
            format=PACKED_TYPES[entry.type_name].format,
            keys=dict.fromkeys(("qdata", "scale", "offset"), entry.name),
            shape=(rows, columns),
            block_size=entry.type.block_size if entry.type else None,
            extras=(("expert", index),) if experts else (),
            nbytes=(entry.nbytes or 0) // count,
        )
