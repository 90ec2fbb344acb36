"""``Proofs``: what self-probes have shown on this machine, remembered on disk for one build of a backend.

A file for each backend, build and machine, below ``proofs`` in the cache's folder. Its first line holds the facts that
a proof depends on: hashes of the backend's and the core's code with their shared libraries, the processor with its
microcode and features, the version of torch, and the ``Q4_*`` variables. A change of any of them names another file.
Each further line is one proof with a digest of itself, so a line that was cut or changed counts for nothing.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib.machinery
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.diagnostics.events import emit
from q4core.machine.cache_folder import cache_folder
from q4core.machine.facts import processor_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from q4core.backend import Backend
    from q4core.plugins.registry import Registry

_VERSION = 1
_SUFFIX = ".proofs"
_MOST_FILES = 8
"""Files of one backend: the instruction sets and settings that one machine uses in turns."""
_CODE = (".py", *importlib.machinery.EXTENSION_SUFFIXES, ".so", ".dll", ".dylib")
_UNRELATED = {"Q4_CACHE", "Q4_CACHE_LIMIT", "Q4_LOG"}
"""Variables on which no numbers depend."""


@attrs.frozen
class ProofFile:
    """One file of proofs, as ``q4 doctor --proofs`` lists it."""

    path: Path
    backend: str
    facts: dict[str, Any]
    is_current: bool
    """Whether its facts are those of this machine, build and environment."""
    count: int
    damaged: int
    """Lines that are no proof any more, which nothing reads."""
    written: float
    """When the last proof was added, in seconds since 1970."""


@attrs.frozen
class Proofs:
    """The proofs in one folder.

    Args:
        folder: Where the files are; made when the first proof is stored.
        backends: Returns the backends by name, whose builds the proofs are of.
    """

    folder: Path
    backends: Callable[[], Mapping[str, Backend]]
    _known: dict[str, dict[str, frozenset[int]]] = attrs.field(factory=dict, init=False)

    @classmethod
    def here(cls, registry: Registry) -> Proofs | None:
        """Return the proofs in this user's cache about a registry's backends, or None where there is no cache."""
        folder = cache_folder()
        return None if folder is None else cls(folder / "proofs", registry.backends)

    def rows(self, backend: str, key: Hashable) -> frozenset[int] | None:
        """Return the numbers of rows for which a path of this build was proven here, or None where none was."""
        if backend not in self._known:
            facts = build_facts(self.backends()[backend])
            self._known[backend] = {} if facts is None else _read(self._path(backend, facts), facts)[0]
        return self._known[backend].get(_digest(key))

    def add(self, backend: str, key: Hashable, rows: Iterable[int], what: str) -> None:
        """Store one proof; a folder that can't be written costs an event and nothing else."""
        facts = build_facts(self.backends()[backend])
        if facts is None:
            return
        entry = {"key": _digest(key), "rows": sorted(rows), "what": what, "time": round(time.time())}
        path = self._path(backend, facts)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                self._make_room(backend)
            with path.open("ab") as file:  # one write, so that lines of two processes do not mix
                head = "" if os.fstat(file.fileno()).st_size else json.dumps(facts, sort_keys=True) + "\n"
                file.write((head + json.dumps({**entry, "check": _digest(entry)}) + "\n").encode())
        except OSError as error:
            emit("q4.proofs", level=logging.WARNING, path=str(path), error=str(error))

    def files(self) -> list[ProofFile]:
        """Return every file there is, in the order of their names."""
        builds = {name: build_facts(backend) for name, backend in self.backends().items()}
        current = {self._path(name, facts) for name, facts in builds.items() if facts is not None}
        found = []
        for path in self._paths():
            with contextlib.suppress(OSError):  # removed meanwhile
                proofs, facts, damaged = _read(path, None)
                name, written = path.name.rpartition("-")[0], path.stat().st_mtime
                found.append(ProofFile(path, name, facts, path in current, len(proofs), damaged, written))
        return found

    def forget(self) -> int:
        """Remove every file, so that the next use of each path proves it anew; return how many there were."""
        paths = self._paths()
        for path in paths:
            path.unlink(missing_ok=True)
        self._known.clear()
        return len(paths)

    def _path(self, backend: str, facts: dict[str, Any]) -> Path:
        return self.folder / f"{backend}-{_digest(facts)[:16]}{_SUFFIX}"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{_SUFFIX}"))

    def _make_room(self, backend: str) -> None:
        """Remove the files of a backend that were not added to for the longest time."""
        own = [path for path in self._paths() if path.name.rpartition("-")[0] == backend]
        for path in sorted(own, key=lambda item: item.stat().st_mtime, reverse=True)[_MOST_FILES - 1 :]:
            path.unlink(missing_ok=True)


def _read(path: Path, facts: dict[str, Any] | None) -> tuple[dict[str, frozenset[int]], dict[str, Any], int]:
    """Return a file's proofs, its facts and how many lines are damaged; nothing where its facts are not these."""
    proofs: dict[str, frozenset[int]] = {}
    head, damaged = None, 0
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            try:
                entry = json.loads(line)
                if head is None:
                    head = entry if isinstance(entry, dict) else {}
                    if facts is not None and head != facts:
                        return {}, head, 0
                elif entry != head:  # two processes may both have begun the file
                    if entry.pop("check") == _digest(entry):
                        proofs[entry["key"]] = proofs.get(entry["key"], frozenset()).union(entry["rows"])
                    else:
                        damaged += 1
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                damaged += 1
    return proofs, head or {}, damaged


def _digest(value: object) -> str:
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:32]


def _plain(value: object) -> object:
    """Return what has the same ``repr`` in every process as long as the value is equal."""
    if isinstance(value, enum.Enum):
        return type(value).__name__, value.name
    kind: Any = type(value)
    if attrs.has(kind):
        return kind.__name__, *(_plain(getattr(value, field.name)) for field in attrs.fields(kind))
    if isinstance(value, dict):
        return sorted((str(key), _plain(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(item)) for item in value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else value


@functools.cache
def code_of(package: str) -> str:
    """Return a hash of a package's code: the files of its folder, and libraries that it loaded from elsewhere."""
    module = sys.modules[package]
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    files = {file for folder in folders for file in folder.rglob("*") if file.name.endswith(_CODE)}
    files |= {Path(file) for file in _loaded(package) if not folders or not file.endswith(".py")}
    found = hashlib.sha256()
    for file in sorted(files, key=lambda item: (item.name, str(item))):
        found.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        found.update(file.read_bytes())
    return found.hexdigest()


def _loaded(package: str) -> Iterator[str]:
    for name, module in [*sys.modules.items()]:
        if (name == package or name.startswith(f"{package}.")) and getattr(module, "__file__", None):
            yield str(module.__file__)


def build_facts(backend: Backend) -> dict[str, Any] | None:
    """Return what a proof of a backend depends on; None for one whose code is in no file, so that nothing is stored."""
    own = {item.__module__.partition(".")[0] for item in type(backend).__mro__} - sys.stdlib_module_names
    if not own or "__main__" in own:
        return None
    try:
        code = {name: code_of(name) for name in sorted({*own, "q4core"})}
    except (OSError, KeyError):
        return None
    settings = {name: value for name, value in os.environ.items() if name.startswith("Q4_") and name not in _UNRELATED}
    return {"version": _VERSION, "code": code, "torch": torch.__version__, "settings": settings, **processor_facts()}
