"""The cache's folder: paths of models' files, their list, and eviction when the folder is full."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import time
from typing import TYPE_CHECKING, Any

import attrs

from q4_lm.prepared.container import TEMPORARY, Container, lock, write_container
from q4core import ConfigError
from q4core.plugin_api import cache_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

__all__ = ["ABANDONED", "Entry", "Store", "open_store", "parse_size"]

_SUFFIX = ".q4prep"
_LIMIT_BYTES = 20 * 10**9
_ABANDONED_SECONDS = 3600
ABANDONED = "its writer was killed"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def open_store(cache: str | os.PathLike[str] = "auto") -> Store | None:
    """Return the cache of a name, or None for no cache; no folder is made yet.

    Args:
        cache: ``"off"``; a folder; or ``"auto"``: the folder in ``Q4_CACHE``, none where that is ``off``, and
            ``q4core`` in the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache``) where it is not set.

    Raises:
        ConfigError: ``cache`` is something else, or below the home folder of a user who has none; or
            ``Q4_CACHE_LIMIT`` is no size such as 20GB.
    """
    given = os.fspath(cache) if isinstance(cache, (str, os.PathLike)) else ""
    if not given or "\0" in given:
        raise ConfigError("cache", name="cache", rule="'auto', 'off' or a folder", value=cache)
    folder = cache_folder(given)
    if folder is None:
        return None
    given_limit = os.environ.get("Q4_CACHE_LIMIT")
    return Store(folder, parse_size("Q4_CACHE_LIMIT", given_limit) if given_limit else _LIMIT_BYTES)


def parse_size(name: str, text: str) -> int:
    """Return a number of bytes from ``20GB``, ``500 MB`` or a plain number; a ``ConfigError`` names what is none."""
    size = re.fullmatch(r"\s*(\d{1,12})\s*([kmgt]?)b?\s*", text, re.IGNORECASE)
    if size is None:
        raise ConfigError("cache", name=name, rule="a size such as 20GB", value=text)
    return int(size[1]) * _UNITS[size[2].lower()]


@attrs.frozen
class Entry:
    """A file of the cache: its path, its size, and when it was last used (seconds since 1970).

    ``unfinished`` says of a temporary file whether it is being written, or its writer was killed; it is None of others.
    """

    path: Path
    nbytes: int
    used: float
    unfinished: str | None = None


@attrs.frozen
class Store:
    """A folder of prepared files.

    Args:
        folder: The folder, which only its owner may enter; made when something is written.
        limit_bytes: Most bytes that its files take together.
    """

    folder: Path
    limit_bytes: int = _LIMIT_BYTES

    def path_of(self, key: Mapping[str, Any]) -> Path:
        """Return where the file for a key is, whether or not there is one."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}{_SUFFIX}"

    def entries(self) -> list[Entry]:
        """Return the files there are, those that writers left unfinished too, the last used ones first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):  # removed meanwhile
                    facts = path.lstat()
                    if path.name.endswith(_SUFFIX):
                        found.append(Entry(path, facts.st_size, facts.st_mtime))
                    elif path.name.endswith(TEMPORARY):
                        state = ABANDONED if _is_abandoned(path) else "being written"
                        found.append(Entry(path, facts.st_size, facts.st_mtime, state))
        return sorted(found, key=lambda entry: -entry.used)

    def open(self, path: Path) -> Container:
        """Open a file, and note that it was used.

        Raises:
            As ``Container``.
        """
        container = Container(path)
        with contextlib.suppress(OSError):
            os.utime(path)  # verification changes a file's time of access, not this one
        return container

    def write(self, path: Path, header: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Write a file, and remove the least recently used ones until all of them fit the limit.

        Raises:
            OSError: The folder can't be written, the disk is full, or the file alone is larger than the limit.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

        def make_room(needed: int) -> None:
            if needed > self.limit_bytes:
                what = f"it takes {needed} bytes, more than the cache's limit of {self.limit_bytes}"
                raise OSError(errno.EFBIG, what)
            self.prune(self.limit_bytes - needed, keep=path)

        write_container(path, dict(header), tensors, before=make_room)

    def prune(self, limit_bytes: int, *, keep: Path | None = None) -> list[Entry]:
        """Remove the least recently used files until the others take at most so many bytes, and return those.

        What killed writers left goes as well. Processes that have a removed file mapped keep it until they close it.
        ``keep`` and files that are being written are neither counted nor removed.
        """
        left, removed = limit_bytes, []
        for entry in self.entries():
            if entry.path == keep or entry.unfinished not in {None, ABANDONED}:
                continue
            left -= entry.nbytes if entry.unfinished is None else 0
            if left < 0 or entry.unfinished:
                with contextlib.suppress(OSError):
                    entry.path.unlink()
                    removed.append(entry)
        return removed


def _is_abandoned(path: Path) -> bool:
    """Return whether the writer of a temporary file has ended: its lock is free, or an hour has passed.

    A writer locks its file before it writes anything, so an empty file may have a writer.
    """
    facts = path.lstat()
    if time.time() - facts.st_mtime > _ABANDONED_SECONDS:
        return True
    if not facts.st_size or not stat.S_ISREG(facts.st_mode):
        return False
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        return lock(descriptor)
    finally:
        os.close(descriptor)
