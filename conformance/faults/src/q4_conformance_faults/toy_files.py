"""A right toy kind of file, with a reader and a writer: ``TOYF``, the header's length, JSON, and tensors in a row."""

from __future__ import annotations

import json
import os
import secrets
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from q4core import CheckpointError, DialectError, PackedWeight, Schema, TensorInfo
from q4core.plugin_api import map_privately, open_regular, parse_json

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from q4core import OpenRequest, SaveRequest

MAGIC = b"TOYF"
FIRST = 12
ALIGNED = 64
_MOST = 1 << 20
_DTYPES = {"f32": torch.float32, "f16": torch.float16}
Entry = tuple[str, TensorInfo, int]
"""Name, dtype and shape, and the first byte behind the header."""


def header_of(infos: Mapping[str, TensorInfo], part: tuple[int, int] = (0, 1), total: int = 0) -> bytes:
    """Return the header of a file with such tensors."""
    at, rows = 0, []
    for name, info in infos.items():
        kind = next((kind for kind, dtype in _DTYPES.items() if dtype == info.dtype), None)
        rows.append([name, kind, [*info.shape], at])
        at += -(-info.nbytes // ALIGNED) * ALIGNED
    text = json.dumps({"part": [*part, total or len(infos)], "tensors": rows}).encode()
    text += b" " * (-(FIRST + len(text)) % ALIGNED)
    return MAGIC + len(text).to_bytes(8, "little") + text


class ToyReader:
    """Opens toy files; planted faults override single methods."""

    def __init__(self, name: str = "toy-files") -> None:
        self.name = name
        self.writer: Any = ToyWriter(self)

    def make_file(self, path: Path, tensors: Mapping[str, torch.Tensor], *part: Any) -> None:
        """Make a file."""
        infos = {name: TensorInfo(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        with path.open("wb") as file:
            file.write(header_of(infos, *part))
            for tensor in tensors.values():
                self.writer.append(file, tensor)

    def make_parts(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> list[Path]:
        """Make a model in three files."""
        paths = [folder / f"{number}.{self.name}" for number in range(3)]
        for number, path in enumerate(paths):
            self.make_file(path, dict([*tensors.items()][number::3]), (number, 3), len(tensors))
        return paths

    def recognises(self, path: Path) -> bool:
        """Return whether a file begins as these do."""
        try:
            with open_regular(path) as file:
                return file.read(len(MAGIC)) == MAGIC
        except (OSError, CheckpointError):
            return False

    def fail(self, path: Path, name: str, rule: str, value: object) -> NoReturn:
        """Refuse a file."""
        raise CheckpointError("toy file", name=name, rule=rule, value=value, where=str(path))

    def open(self, path: Path, request: OpenRequest) -> Any:
        """Open a file, and the other parts of its model."""
        entries, start, (number, count, total) = self.header(path)
        homes = {name: (path, info, start + at) for name, info, at in entries}
        for other in self.parts(path, number, count):
            more, first, facts = self.header(other)
            if facts[1:] != (count, total) or {name for name, *_ in more} & homes.keys():
                self.fail(other, "part", f"one of the {count} of {path.name}", facts)
            homes |= {name: (other, info, first + at) for name, info, at in more}
        if len(homes) != total:
            self.fail(path, "tensors", f"{total} in all parts", len(homes))
        return self.source(path, homes, request)

    def parts(self, path: Path, number: int, count: int) -> list[Path]:
        """Return the other parts of a model."""
        others = [path.with_name(f"{index}{path.suffix}") for index in range(count) if index != number]
        missing = [other.name for other in others if not other.is_file()]
        if missing:
            self.fail(path, "parts", "there", missing)
        return others

    def header(self, path: Path) -> tuple[list[Entry], int, tuple[int, int, int]]:
        """Return what a file's checked header says."""
        with open_regular(path) as file:
            head = file.read(FIRST)
            length, size = int.from_bytes(head[len(MAGIC) :], "little"), os.fstat(file.fileno()).st_size
            if len(head) < FIRST or length > min(size - FIRST, _MOST):
                self.fail(path, "header", f"whole in a file of {size} bytes", length)
            text = parse_json(file.read(length), what="toy header", where=str(path))
        try:
            number, count, total = map(int, text["part"])
            entries = [self.entry(*row) for row in text["tensors"]]
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            self.fail(path, "header", "part and tensors", str(error))
        if not 0 <= number < count < ALIGNED:
            self.fail(path, "part", "one of at most 64", [number, count])
        problems = list(self.problems(entries, size - FIRST - length))
        if problems:
            self.fail(path, "tensors", "in their places", "; ".join(problems))
        return entries, FIRST + length, (number, count, total)

    def entry(self, name: str, kind: str, shape: list[int], at: int) -> Entry:
        """Return a row of the header."""
        if not all(type(item) is int and 0 <= item < 1 << 40 for item in (*shape, at)):
            raise ValueError(f"no sizes of {name}: {shape}, {at}")
        return str(name), TensorInfo(_DTYPES[kind], tuple(shape)), at

    def problems(self, entries: list[Entry], size: int) -> Iterator[str]:
        """Yield what is wrong with the places of tensors."""
        ends, names, last = 0, set(), ""
        for name, info, at in sorted(entries, key=lambda entry: entry[2]):
            if name in names:
                yield f"{name} is there twice"
            if at < ends:
                yield f"{name} overlaps {last}"
            if at + info.nbytes > size or at % info.dtype.itemsize:
                yield f"{name} lies outside of the file"
            names.add(name)
            ends, last = at + info.nbytes, name

    def map(self, file: BinaryIO) -> mmap.mmap | bytearray:
        """Return a file's bytes."""
        return map_privately(file)

    def load(self, path: Path, info: TensorInfo, at: int, *, copy: bool) -> torch.Tensor:
        """Return one tensor."""
        if not info.numel:
            return torch.empty(info.shape, dtype=info.dtype)
        with open_regular(path) as file:
            flat = torch.frombuffer(self.map(file), dtype=torch.uint8, count=info.nbytes, offset=at)
        flat = flat.clone() if copy or flat.data_ptr() % info.dtype.itemsize else flat
        return flat.view(info.dtype).view(info.shape)

    def source(self, path: Path, homes: Mapping[str, tuple[Path, TensorInfo, int]], request: OpenRequest) -> Any:
        """Return an open file."""
        return SimpleNamespace(
            path=path,
            metadata={},
            schema=Schema(dense=tuple(homes)),
            dense={name: info for name, (_, info, _) in homes.items()},
            load=lambda name: self.load(*homes[name], copy=request.copy),
            close=lambda: None,
        )


class ToyWriter:
    """Writes toy files of dense tensors, one tensor at a time; planted faults override single methods."""

    def __init__(self, reader: ToyReader) -> None:
        self.name = reader.name

    def accepts(self, path: Path) -> bool:
        """Return whether a path has the name of such a file."""
        return path.suffix == f".{self.name}"

    def append(self, file: BinaryIO, tensor: torch.Tensor) -> None:
        """Write one tensor."""
        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.write(bytes(-tensor.nbytes % ALIGNED))

    def write(self, path: Path, weights: Mapping[str, PackedWeight], request: SaveRequest) -> Path:
        """Write a file: the tensors to one file, the header and these to another, which takes the old one's place."""
        if weights or request.dialect != self.name:
            raise DialectError("toy file", name="dialect", rule="none of packed weights", value=request.dialect)
        for left in path.parent.glob(".toy-*"):
            left.unlink()
        data, whole = (path.with_name(f".toy-{secrets.token_hex(4)}") for _ in range(2))
        try:
            self.fill(data, whole, request.dense or {})
            whole.replace(path)
        finally:
            self.clear(data, whole)
        return path

    def clear(self, *paths: Path) -> None:
        """Remove temporary files."""
        for path in paths:
            path.unlink(missing_ok=True)

    def fill(self, data: Path, whole: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the new file."""
        infos = {}
        with data.open("wb") as file:
            for name, tensor in tensors.items():
                infos[name] = TensorInfo(tensor.dtype, tensor.shape)
                self.append(file, tensor)
        with whole.open("wb") as file, data.open("rb") as rest:
            file.write(header_of(infos))
            while piece := rest.read(_MOST):
                file.write(piece)
