"""Writing GGUF files: one layer at a time, and published when everything is on the disk.

The header comes before the data and needs the type and size of every tensor. So the bytes of layers go into a temporary
file first, in the order in which they come, and are copied behind the header, in the order of tensors.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import re
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch

from q4_gguf.dialect import GgufDialect
from q4_gguf.encoding import encode_header
from q4_gguf.forms import form_of
from q4_gguf.ggml import DENSE_TYPES, number_of
from q4_gguf.stored import Piece, Stored
from q4_gguf.values import TypedInt
from q4core import CheckpointError, DialectError, WeightError
from q4core.plugin_api import Staging, emit, sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from q4core import PackedWeight, SaveRequest

__all__ = ["GgufWriter"]

_SUFFIX, _FACTOR = ".weight", ".scale"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_MOST_NAME_BYTES = 63
_MOST_DIMENSIONS = 4
_ALIGNMENT, _SPLIT = "general.alignment", "split."
_MOST_ALIGNMENT = 1 << 20
_VERSION, _FILE_TYPE = "general.quantization_version", "general.file_type"
_MOST_PARTS = 99_999
_CHUNK_BYTES = 1 << 23
_DENSE = {dtype: name for name, dtype in DENSE_TYPES.items()}
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39,
}  # fmt: skip
"""Type of most matrices → llama.cpp's number of such files, which is shown and decides nothing."""


def _fail(name: str, rule: str, value: object, hint: str | None = "Nothing was written.") -> NoReturn:
    raise CheckpointError("save_checkpoint", name=name, rule=rule, value=value, hint=hint)


@attrs.frozen
class _Tensor:
    """A tensor of the file, and where its bytes are in the temporary one: first bytes and counts, in order."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(count for _, count in self.pieces)


class GgufWriter:
    """Writes GGUF files, in one or in parts."""

    name = "gguf"
    dialect = GgufDialect()
    """What it takes, and the nearest to what it does not, for those who convert."""

    def accepts(self, path: Path) -> bool:
        """Return whether a path is a GGUF file's, by its name."""
        return path.name.endswith(".gguf") and not path.is_dir()

    def write(self, path: Path, weights: Mapping[str, PackedWeight], request: SaveRequest) -> Path:
        """Write a file, all of it or nothing; see ``q4core.save_checkpoint``.

        The layer ``name`` becomes the tensor ``name.weight``, and layers named ``…exps.0`` … ``…exps.E-1`` one of E
        experts. Each has the ggml type whose form it has. With ``max_shard_bytes``, a file that would be larger becomes
        several, ``NAME-00001-of-0000N.gguf``, and the first is returned.

        Raises:
            DialectError: The dialect is not ``"gguf"``, or no type holds a weight; the message names what.
            WeightError: A weight holds illegal numbers.
            CheckpointError: An argument is not what it must be, names collide, or the files can't be written.
        """
        _check_request(path, request)
        dense = request.dense or {}
        staging: Staging | None = None
        is_stopped = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            staging = Staging(path.parent, request.resume)
            with contextlib.closing(Stored(staging.path, is_noted=request.resume is not None)) as stored:
                contents = _Contents(stored, self.dialect if request.lossy else None)
                for module in weights:
                    if not contents.adopt(module, is_layer=True):
                        contents.add_layer(module, weights[module])
                for name in dense:
                    if not contents.adopt(name, is_layer=False):
                        contents.add_dense(name, dense[name])
                tensors = contents.tensors()
                stored.data.flush()
                return _publish(path, tensors, stored.data, staging, request)
        except (KeyboardInterrupt, SystemExit):
            is_stopped = request.resume is not None
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(
                "save_checkpoint", name="file", rule="writable", value=reason, where=str(path)
            ) from error
        finally:
            if staging is not None:
                (staging.release if is_stopped else staging.discard)()


def _check_request(path: Path, request: SaveRequest) -> None:
    if request.dialect != "gguf":
        hint = "A file that ends in .gguf holds GGUF's own types alone; name a folder, or a .safetensors file."
        raise DialectError("save_checkpoint", name="dialect", rule="'gguf'", value=request.dialect, hint=hint)
    if request.config is not None:
        _fail("config", "None, as a GGUF file holds the model's facts as metadata", "given")
    limit = request.max_shard_bytes
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        _fail("max_shard_bytes", "a positive integer", limit)
    if _PART.search(path.name.removesuffix(".gguf")):
        _fail("path", "the name of a whole model, to which the numbers of parts are added", path.name)
    alignment = (request.metadata or {}).get(_ALIGNMENT, 32)
    is_whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not is_whole or not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        _fail(f"metadata[{_ALIGNMENT!r}]", f"a power of two, at most {_MOST_ALIGNMENT}", alignment)


class _Contents:
    """The tensors of a file, whose bytes are in a temporary one."""

    def __init__(self, stored: Stored, lossy: GgufDialect | None) -> None:
        self._stored = stored
        self._lossy = lossy
        self._layers: dict[str, _Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}
        self._dense: dict[str, _Tensor] = {}

    def adopt(self, name: str, *, is_layer: bool) -> bool:
        """Take a layer or dense tensor as a killed writer stored it; return False where it did not."""
        piece = self._stored.adopt(name, is_layer=is_layer)
        if piece is not None:
            self._take(piece)
        return piece is not None

    def _take(self, piece: Piece) -> None:
        home = self._layers if piece.is_layer else self._dense
        home[piece.name] = _Tensor(piece.name, piece.type_name, piece.shape, ((piece.position, piece.nbytes),))
        if piece.factor is not None:
            self._factors[piece.name] = torch.tensor([piece.factor], dtype=torch.float32)

    def _store(self, piece: Piece, chunks: Iterable[torch.Tensor]) -> None:
        start, count, digest = self._stored.append(chunks)
        piece = attrs.evolve(piece, position=start, nbytes=count, digest=digest)
        self._take(piece)
        self._stored.note(piece)

    def add_layer(self, module: str, weight: PackedWeight) -> None:
        """Write one layer's bytes."""
        try:
            weight.check_values()
        except WeightError as error:
            hint = "Quantise the layer again; nothing was written."
            facts: dict[str, Any] = {"rule": error.rule, "value": error.value, "hint": hint}
            raise WeightError(f"save_checkpoint: layer {module!r}", name=error.name, **facts) from error
        if self._lossy is not None:
            try:
                self._lossy.write(module, weight)
            except DialectError as error:
                emit("q4.approximate", level=logging.WARNING, layer=module, dialect="gguf", why=error.summary)
                weight = self._lossy.approximate(weight)
        form = form_of(module, weight)
        factor = None if weight.global_scale is None else float(weight.global_scale)
        piece = Piece(name=module, is_layer=True, type_name=form.type_name, shape=weight.shape, factor=factor)
        self._store(piece, form.rows())

    def add_dense(self, name: str, tensor: torch.Tensor) -> None:
        """Write one other tensor's bytes."""
        if tensor.dtype not in _DENSE or tensor.is_meta or tensor.layout is not torch.strided:
            rule = f"a strided tensor with data, of a dtype of GGUF ({', '.join(map(str, _DENSE))})"
            _fail(name, rule, f"{tensor.dtype}, {tensor.layout}, {tensor.device}")
        if not tensor.numel() or tensor.dim() > _MOST_DIMENSIONS:
            _fail(name, f"of at most {_MOST_DIMENSIONS} dimensions, none of them 0", list(tensor.shape))
        whole = tensor.detach().to("cpu").contiguous()
        piece = Piece(name=name, is_layer=False, type_name=_DENSE[tensor.dtype], shape=tensor.shape)
        self._store(piece, (whole,))

    def tensors(self) -> list[_Tensor]:
        """Return every tensor of the file, experts joined.

        Raises:
            CheckpointError: Two have one name, a name is too long, or experts differ or are missing.
        """
        found = [tensor for stem, parts in self._stacks().items() for tensor in self._joined(stem, parts)]
        found += self._dense.values()
        names: set[str] = set()
        for tensor in found:
            size = len(tensor.name.encode())
            if size > _MOST_NAME_BYTES:
                _fail(f"tensor name {tensor.name!r}", f"at most {_MOST_NAME_BYTES} bytes long, for ggml", size)
            if tensor.name in names:
                _fail("tensor name", "there once", tensor.name)
            names.add(tensor.name)
        return found

    def _stacks(self) -> dict[str, list[str]]:
        """Return the name of each tensor of layers, and the layers that it holds, experts by number."""
        stacks: dict[str, dict[int, str]] = {}
        single: dict[str, list[str]] = {}
        for module in self._layers:
            found = GgufDialect.stack_of(module)
            if found is None:
                single[module] = [module]
            else:
                stacks.setdefault(found[0], {})[found[1]] = module
        for stem, numbered in stacks.items():
            missing = sorted({*range(max(numbered) + 1)} - numbered.keys())
            if missing:
                _fail(f"layers {stem}.…", "numbered from 0 on, without a gap, as experts are", f"no {missing[0]}")
            if stem in single:
                _fail("layer", "a matrix or experts", stem)
            single[stem] = [numbered[number] for number in range(len(numbered))]
        return single

    def _joined(self, stem: str, modules: list[str]) -> Iterator[_Tensor]:
        parts = [self._layers[module] for module in modules]
        first = parts[0]
        for part in parts[1:]:
            if (part.type_name, part.shape) != (first.type_name, first.shape):
                rule = f"of type {first.type_name} and shape {[*first.shape]}, as expert 0"
                _fail(f"layer {part.name!r}", rule, f"{part.type_name} {[*part.shape]}")
        shape = first.shape if modules == [stem] else (len(parts), *first.shape)
        yield _Tensor(stem + _SUFFIX, first.type_name, shape, tuple(part.pieces[0] for part in parts))
        factors = [self._factors[module] for module in modules if module in self._factors]
        if factors:
            if len(factors) != len(modules):
                _fail(f"layers {stem}.…", "all with a global scale, or none", f"{len(factors)} of {len(modules)}")
            start, count, _ = self._stored.append((torch.cat(factors),))
            yield _Tensor(stem + _FACTOR, "F32", (len(factors),), ((start, count),))


def _parts(tensors: list[_Tensor], limit: int | None) -> list[list[_Tensor]]:
    """Return the tensors of each file."""
    parts: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if limit is not None and parts[-1] and size + tensor.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    return parts


def _publish(path: Path, tensors: list[_Tensor], data: BinaryIO, staging: Staging, request: SaveRequest) -> Path:
    """Write the files, give them their names, and return the first."""
    parts = _parts(tensors, request.max_shard_bytes)
    if len(parts) > _MOST_PARTS:
        _fail("max_shard_bytes", f"such that there are at most {_MOST_PARTS} files", request.max_shard_bytes)
    metadata = _whole_metadata(tensors, request.metadata or {})
    alignment = int(metadata.get(_ALIGNMENT, 32))
    names = [path.name]
    if len(parts) > 1:
        stem = path.name.removesuffix(".gguf")
        names = [f"{stem}-{index:05d}-of-{len(parts):05d}.gguf" for index in range(1, len(parts) + 1)]
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        own = metadata if not index else {key: metadata[key] for key in (_ALIGNMENT,) if key in metadata}
        if len(parts) > 1:
            own = own | {
                "split.no": TypedInt(index, "uint16"),
                "split.count": TypedInt(len(parts), "uint16"),
                "split.tensors.count": TypedInt(len(tensors), "int32"),
            }
        _write_file(staging.path / name, own, part, data, alignment)
    for name in reversed(names):  # the first part last: without it, nothing opens
        (staging.path / name).replace(path.with_name(name))
    if len(parts) > 1:
        path.unlink(missing_ok=True)
    sync(path.parent)
    return path.with_name(names[0])


def _whole_metadata(tensors: list[_Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a whole model; what llama.cpp asks for is added where it is absent."""
    metadata = {key: value for key, value in given.items() if not key.startswith(_SPLIT)}
    matrices = collections.Counter(tensor.type_name for tensor in tensors if len(tensor.shape) > 1)
    if not matrices.keys() <= {*_DENSE.values()}:
        metadata.setdefault(_VERSION, 2)
    commonest = next((name for name, _ in matrices.most_common() if name in _FILE_TYPES), None)
    if commonest is not None:
        metadata.setdefault(_FILE_TYPE, _FILE_TYPES[commonest])
    return metadata


def _write_file(
    path: Path, metadata: Mapping[str, Any], tensors: list[_Tensor], data: BinaryIO, alignment: int
) -> None:
    """Write one file, down to the disk."""
    entries, offset = [], 0
    for tensor in tensors:
        entries.append((tensor.name, tensor.shape, number_of(tensor.type_name)[0], offset))
        offset += -(-tensor.nbytes // alignment) * alignment
    header = encode_header(metadata, entries)
    with path.open("xb") as file:
        file.write(header + bytes(-len(header) % alignment))
        for tensor in tensors:
            for start, count in tensor.pieces:
                data.seek(start)
                for left in range(count, 0, -_CHUNK_BYTES):
                    file.write(data.read(min(left, _CHUNK_BYTES)))
            file.write(bytes(-tensor.nbytes % alignment))
    sync(path)
