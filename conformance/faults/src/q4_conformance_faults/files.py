"""The faults planted in the reader and the writer of toy files."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; the toys document what is overridden

from __future__ import annotations

import itertools
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.outcome import Outcome
from q4_conformance_faults.fault import file_fault
from q4_conformance_faults.toy_files import MAGIC, Entry, ToyReader, ToyWriter
from q4core import CheckpointError
from q4core.plugin_api import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import BinaryIO, NoReturn

    from q4core import OpenRequest, PackedWeight, SaveRequest


@file_fault("claims-foreign-files", "EX-23/detect", "zeros: is claimed")
class ClaimsForeign(ToyReader):
    """Takes whatever file there is."""

    def recognises(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_size > len(MAGIC)


@file_fault("stumbles-over-paths", "EX-23/detect", "no file: recognises raised FileNotFoundError")
class Stumbles(ToyReader):
    """Opens what is not there."""

    def recognises(self, path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC


@file_fault("waits-for-a-pipe", "EX-23/detect", "no answer", ends=Outcome.TIMEOUT)
class WaitsForPipes(ToyReader):
    """Opens a pipe, and waits for who writes into it."""

    def recognises(self, path: Path) -> bool:
        return path.exists() and not path.is_dir() and path.open("rb").read(len(MAGIC)) == MAGIC


@file_fault("rounds-tensors", "EX-23/whole", "other bytes of kit.a")
class Rounds(ToyReader):
    """Gives float32 as it was after float16."""

    def load(self, path: Path, info: Any, at: int, *, copy: bool) -> torch.Tensor:
        return super().load(path, info, at, copy=copy).half().to(info.dtype)


@file_fault("writes-through", "EX-23/whole", "comes into the file")
class WritesThrough(ToyReader):
    """Maps a file for all to see."""

    def map(self, file: BinaryIO) -> mmap.mmap:
        with Path(file.name).open("rb+") as shared:
            return mmap.mmap(shared.fileno(), 0)


@file_fault("reads-eagerly", "EX-23/lazy", "reads 67,")
class ReadsEagerly(ToyReader):
    """Reads every byte as it opens a file, to look whether it can."""

    def open(self, path: Path, request: OpenRequest) -> Any:
        with open_regular(path) as file:
            while file.read(1 << 20):
                pass
        return super().open(path, request)


@file_fault("holds-the-file", "EX-23/lazy", "bytes of memory")
class HoldsFile(ReadsEagerly):
    """Reads a file whole."""

    def open(self, path: Path, request: OpenRequest) -> Any:
        self.held = path.read_bytes()
        return ToyReader.open(self, path, request)


@file_fault("copies-tensors", "EX-23/lazy", "bytes of memory as it is given")
class CopiesTensors(ToyReader):
    """Gives copies, asked for or not."""

    def load(self, path: Path, info: Any, at: int, *, copy: bool) -> torch.Tensor:
        return super().load(path, info, at, copy=True)


@file_fault("trusts-the-end", "EX-23/cut", "no typed error, but ValueError")
class TrustsEnd(ToyReader):
    """Takes for granted that a file has all of its tensors."""

    def problems(self, entries: list[Entry], size: int) -> Iterator[str]:
        return super().problems(entries, 1 << 60)


@file_fault("forgets-the-file", "EX-23/cut", "does not name the file")
class ForgetsFile(ToyReader):
    """Refuses files without a word of which."""

    def fail(self, path: Path, name: str, rule: str, value: object) -> NoReturn:
        raise CheckpointError("toy file", name=name, rule=rule, value=value)


@file_fault("fills-up-cut-files", "EX-23/cut", "it opens")
class FillsUp(TrustsEnd):
    """Takes zeros for the bytes that are gone."""

    def map(self, file: BinaryIO) -> bytearray:
        return bytearray(file.read() + bytes(4096))


@file_fault("waits-for-the-rest", "EX-23/cut", "no answer", ends=Outcome.TIMEOUT)
class WaitsForRest(ToyReader):
    """Reads until it has all that a header announces."""

    def header(self, path: Path) -> Any:
        with open_regular(path) as file:
            length, text = int.from_bytes(file.read(12)[4:], "little"), b""
            while len(text) < length:
                text += file.read(length - len(text))
        return super().header(path)


@file_fault("accepts-overlaps", "EX-23/hostile", "in the places of two others: it opens")
class AcceptsOverlaps(ToyReader):
    """Lets tensors share bytes."""

    def problems(self, entries: list[Entry], size: int) -> Iterator[str]:
        return (text for text in super().problems(entries, size) if "overlaps" not in text)


@file_fault("takes-counts-at-their-word", "EX-23/hostile", "bytes of memory")
class TakesCounts(ToyReader):
    """Makes room for what a header announces, up to a gigabyte, before it looks whether it is there."""

    def header(self, path: Path) -> Any:
        with open_regular(path) as file:
            torch.zeros(min(int.from_bytes(file.read(12)[4:], "little"), 1 << 30), dtype=torch.uint8)
        return super().header(path)


@file_fault("counts-to-the-end", "EX-23/hostile", "no answer", ends=Outcome.TIMEOUT)
class CountsOn(ToyReader):
    """Looks at each of as many rows as a header announces."""

    def header(self, path: Path) -> Any:
        with open_regular(path) as file:
            for _ in range(int.from_bytes(file.read(12)[4:], "little")):
                pass
        return super().header(path)


@file_fault("takes-the-last-of-a-name", "EX-23/names", "two names that are there twice: it opens")
class TakesLast(ToyReader):
    """Lets a name be there twice."""

    def problems(self, entries: list[Entry], size: int) -> Iterator[str]:
        return (text for text in super().problems(entries, size) if "twice" not in text)

    def parts(self, path: Path, number: int, count: int) -> list[Path]:
        return []

    def open(self, path: Path, request: OpenRequest) -> Any:
        entries, start, _ = self.header(path)
        return self.source(path, {name: (path, info, start + at) for name, info, at in entries}, request)


@file_fault("stops-at-the-first-problem", "EX-23/names", "kit.c is not reported")
class StopsAtFirst(ToyReader):
    """Reports the first problem alone."""

    def problems(self, entries: list[Entry], size: int) -> Iterator[str]:
        return itertools.islice(super().problems(entries, size), 1)


@file_fault("does-without-parts", "EX-23/parts", "is missing, and the model opens")
class DoesWithout(ToyReader):
    """Opens the parts that are there."""

    def parts(self, path: Path, number: int, count: int) -> list[Path]:
        return [other for other in path.parent.glob(f"*{path.suffix}") if other != path]

    def open(self, path: Path, request: OpenRequest) -> Any:
        homes: dict[str, tuple[Path, Any, int]] = {}
        for part in (path, *self.parts(path, 0, 3)):
            entries, start, _ = self.header(part)
            homes |= {name: (part, info, start + at) for name, info, at in entries}
        return self.source(path, homes, request)


class _FaultyWriter(ToyReader):
    """A right reader of a writer with a fault."""

    faulty: type[ToyWriter]

    def __init__(self, name: str = "toy-files") -> None:
        super().__init__(name)
        self.writer = self.faulty(self)


def _writer_fault(name: str, part: str, says: str) -> Callable[[type[ToyWriter]], type[ToyWriter]]:
    def enter(faulty: type[ToyWriter]) -> type[ToyWriter]:
        file_fault(name, f"EX-24/{part}", says)(type(faulty.__name__, (_FaultyWriter,), {"faulty": faulty}))
        return faulty

    return enter


@_writer_fault("writes-half", "round", "other bytes of kit.a")
class WritesHalf(ToyWriter):
    """Writes float32 as it is after float16."""

    def append(self, file: BinaryIO, tensor: torch.Tensor) -> None:
        super().append(file, tensor.half().to(tensor.dtype))


@_writer_fault("promises-layers", "round", "no weight is written")
class PromisesLayers(ToyWriter):
    """Has a dialect, none of whose weights it writes."""

    dialect = SimpleNamespace(formats={"nf4"})


@_writer_fault("leaves-temporary-files", "atomic", "it leaves .toy-")
class LeavesFiles(ToyWriter):
    """Removes nothing where it fails."""

    def clear(self, *paths: Path) -> None:
        if not all(path.exists() for path in paths[:1]) or not paths[1].exists():
            return
        super().clear(*paths)


@_writer_fault("writes-in-place", "atomic", "the old file is gone or changed")
class WritesInPlace(ToyWriter):
    """Empties the old file first."""

    def write(self, path: Path, weights: Mapping[str, PackedWeight], request: SaveRequest) -> Path:
        if path.exists():
            path.write_bytes(b"")
        return super().write(path, weights, request)


@_writer_fault("renames-too-early", "killed", "the old file is gone or changed")
class RenamesEarly(ToyWriter):
    """Takes the old file away while it writes; where it fails, the file comes back."""

    def write(self, path: Path, weights: Mapping[str, PackedWeight], request: SaveRequest) -> Path:
        old = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        try:
            return super().write(path, weights, request)
        except BaseException:
            if old is not None:
                path.write_bytes(old)
            raise


@_writer_fault("never-clears-up", "killed", "the next one leaves its .part-")
class NeverClears(ToyWriter):
    """Does not look for what a killed writer left."""

    def fill(self, data: Path, whole: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        own = [path.with_name(path.name.replace(".toy-", ".part-")) for path in (data, whole)]
        try:
            super().fill(own[0], own[1], tensors)
            own[1].replace(whole)
        finally:
            self.clear(*own)


@_writer_fault("holds-every-tensor", "stream", "bytes of memory")
class HoldsTensors(ToyWriter):
    """Takes all tensors before it writes the first."""

    def fill(self, data: Path, whole: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        super().fill(data, whole, dict(tensors))
