"""The subject of files: a reader, the writer of its name, and the files that one of them makes to judge it by."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.outcome import FailureError, NotDeclaredError
from q4core import DialectError, OpenRequest, Q4Error, SaveRequest, default_registry, dialects
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from q4core import CheckpointSource, PackedWeight

READERS, WRITERS = "q4_checkpoint_readers", "q4_checkpoint_writers"
_WAY_OUT = "files to judge it by; give it make_file(path, tensors), or a writer of its name"
_PARTS = "models in several files; give it make_parts(folder, tensors) -> paths, the one that opens them first"


class FileSubject:
    """A reader of files, itself or the name of an installed one.

    Files are made by the reader's own ``make_file(path, tensors)``, where it has one, or by the writer of its name.
    Models in several files are made by ``make_parts(folder, tensors)``, or by the writer with ``max_shard_bytes``.

    Raises:
        LookupError: No reader of that name is installed.
        FailureError: It is no reader.
    """

    def __init__(self, reader: Any) -> None:
        registry = default_registry()
        if isinstance(reader, str):
            reader = registry.items(READERS)[reader]
        lacking = [name for name in ("name", "recognises", "open") if not hasattr(reader, name)]
        if lacking:
            raise FailureError(f"a reader must have {', '.join(lacking)}, got {reader!r}")
        self.reader = reader
        self.name: str = reader.name
        self.writer: Any = getattr(reader, "writer", None) or registry.items(WRITERS).get(self.name)
        self.lacks = "" if hasattr(reader, "make_file") or self.writer is not None else _WAY_OUT

    def missing(self, check: str) -> str:
        """Return what a check needs and is not there; nothing where all is."""
        if check.startswith("file_write") and self.writer is None:
            return "a writer of its name"
        return self.lacks

    def path(self, folder: Path, stem: str = "x") -> Path:
        """Return the path of a file of this kind: it ends in the reader's name."""
        return folder / f"{stem}.{self.name}"

    def make(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make a file."""
        if hasattr(self.reader, "make_file"):
            self._ask("make_file", functools.partial(self.reader.make_file, path, tensors))
        else:
            self.write(path, {}, dense=tensors)

    def make_parts(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> list[Path]:
        """Make a model in several files in a folder, and return them, the one that opens the model first."""
        if hasattr(self.reader, "make_parts"):
            made: list[Path] = list(self._ask("make_parts", functools.partial(self.reader.make_parts, folder, tensors)))
            return made
        try:
            main = self.writer.write(folder, {}, self._request(self.written_as, dense=tensors, max_shard_bytes=1))
        except (AttributeError, Q4Error) as error:
            raise NotDeclaredError(_PARTS) from error
        return [main, *sorted(path for path in folder.iterdir() if path not in {main, folder / "config.json"})]

    def open(self, path: Path, *, copy: bool = False) -> CheckpointSource:
        """Open a file; what the reader raises comes out as it is."""
        source: CheckpointSource = self.reader.open(path, OpenRequest(dialects=tuple(dialects()), copy=copy))
        return source

    def read(self, path: Path) -> dict[str, torch.Tensor]:
        """Return a file's dense tensors, copied."""
        source: CheckpointSource = self._ask("open", functools.partial(self.open, path))
        try:
            return {name: self._ask("load", functools.partial(source.load, name)).clone() for name in source.dense}
        finally:
            source.close()

    @functools.cached_property
    def written_as(self) -> str:
        """The dialect in which the writer writes dense tensors: that of its own name, or the first that it takes."""
        with tempfile.TemporaryDirectory() as folder:
            for name in self.dialects:
                with contextlib.suppress(DialectError):
                    self.write(self.path(Path(folder)), {}, dialect=name, dense={"x": torch.ones(4)})
                    return name
        raise FailureError(f"the writer takes no dialect of {', '.join(self.dialects)}")

    @property
    def dialects(self) -> tuple[str, ...]:
        """Names of the dialects that a writer may have."""
        return (self.name, *(item.name for item in dialects()))

    def _request(self, dialect: str, **facts: Any) -> SaveRequest:
        return SaveRequest(dialect=dialect, dialects=tuple(dialects()), **facts)

    def write(
        self, path: Path, weights: Mapping[str, PackedWeight], *, dialect: str | None = None, **facts: Any
    ) -> None:
        """Write a file; what the writer raises comes out as it is."""
        self.writer.write(path, weights, self._request(dialect or self.written_as, **facts))

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PLUGIN_FAULTS as error:
            raise FailureError(f"{what} raised {describe_exception(error)}") from error
