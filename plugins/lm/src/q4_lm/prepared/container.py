"""One file of prepared tensors: a checked header, then the tensors, which are mapped and never copied.

| bytes | what |
|---|---|
| 8 | ``q4prep`` and the version, 1, as two digits |
| 8 | length of the header, little-endian |
| 32 | SHA-256 of the header |
| … | the header: JSON in UTF-8, with ``size`` (of the file) and ``tensors`` (dtype, shape, position, SHA-256) |
| … | the tensors, in the machine's byte order, each at a multiple of 64 bytes |

Opening checks the header's digest and every size against the file. The tensors' digests are read by ``verify``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import stat
import struct
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from q4core import CheckpointError
from q4core.plugin_api import map_privately

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["TEMPORARY", "Container", "lock", "write_container"]

_MAGIC = b"q4prep01"
_HEAD = struct.Struct("<8sQ32s")
_ALIGNMENT = 64
_MOST_HEADER_BYTES = 1 << 28
TEMPORARY = ".tmp"
"""Ending of files that are being written."""


def _bytes(tensor: torch.Tensor) -> memoryview:
    values: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def lock(descriptor: int) -> bool:
    """Lock an open file for this process without waiting; False where another has it, or there are no such locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_container(
    path: Path, header: dict[str, Any], tensors: Sequence[torch.Tensor], before: Callable[[int], object] | None = None
) -> int:
    """Write a container whole or not at all, and return its size; an existing one is replaced.

    The temporary file is locked while its writer lives, and a lock ends with its process.

    Args:
        path: Where; the folder must be there.
        header: What JSON holds; ``size`` and ``tensors`` are added to it.
        tensors: Contiguous tensors on the CPU.
        before: Called with the file's size before anything is written.

    Raises:
        OSError: It can't be written; nothing is left of it.
    """
    entries: list[dict[str, Any]] = []
    at = 0
    for tensor in tensors:
        at = _aligned(at)
        digest = hashlib.sha256(_bytes(tensor)).hexdigest()
        name = str(tensor.dtype).removeprefix("torch.")
        entries.append({"dtype": name, "shape": list(tensor.shape), "at": at, "sha256": digest})
        at += tensor.nbytes

    def text(size: int) -> bytes:
        # Positions count from the end of the header, and the size has a fixed width: neither changes its length.
        return json.dumps({**header, "size": f"{size:016d}", "tensors": entries}, ensure_ascii=False).encode()

    start = _aligned(_HEAD.size + len(text(0)))
    encoded = text(start + at)
    head = _HEAD.pack(_MAGIC, len(encoded), hashlib.sha256(encoded).digest()) + encoded
    if before is not None:
        before(start + at)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            lock(descriptor)
            file.write(head)
            for tensor, entry in zip(tensors, entries, strict=True):
                file.seek(start + entry["at"])
                file.write(_bytes(tensor))
            file.truncate(start + at)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return start + at


class Container:
    """An open container: its header, and its tensors as views of the mapped file, which lasts as long as they do.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is no such file, of another version or owner, cut short, or its header is damaged.
        FileNotFoundError: There is none.
        OSError: The system can't open or map it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or (hasattr(os, "geteuid") and facts.st_uid != os.geteuid()):
                self._fail("file", "a regular one of this user", f"mode {facts.st_mode:o} of user {facts.st_uid}")
            head = file.read(_HEAD.size)
            if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
                self._fail("start", repr(_MAGIC), head[:8])
            if len(head) < _HEAD.size:
                self._fail("size", f"at least {_HEAD.size} bytes; the file was cut short", len(head))
            _, length, digest = _HEAD.unpack(head)
            if length > min(facts.st_size, _MOST_HEADER_BYTES):
                self._fail("header", f"inside the file of {facts.st_size} bytes", length)
            encoded = file.read(length)
            if hashlib.sha256(encoded).digest() != digest:
                self._fail("header", "of the digest before it", "another one")
            self.header: dict[str, Any] = json.loads(encoded)
            self.nbytes = facts.st_size
            if int(self.header["size"]) != facts.st_size:
                self._fail("size", f"{int(self.header['size'])} bytes", facts.st_size)
            self._start = _aligned(_HEAD.size + length)
            self._data: mmap.mmap = map_privately(file)

    def _fail(self, name: str, rule: str, value: object) -> NoReturn:
        raise CheckpointError("prepared file", name=name, rule=rule, value=value, where=str(self.path))

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.header["tensors"])

    def tensor(self, index: int) -> torch.Tensor:
        """Return a tensor as a view of the file.

        Raises:
            CheckpointError: Its entry does not fit the file.
        """
        entry = self.header["tensors"][index]
        dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
        count = math.prod(shape) * dtype.itemsize
        at = self._start + entry["at"]
        if at % _ALIGNMENT or min(shape, default=0) < 0 or not self._start <= at <= self.nbytes - count:
            self._fail(f"tensor {index}", "aligned and inside the file", entry)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._data, dtype=dtype, count=math.prod(shape), offset=at).view(shape)

    def checked_bytes(self, index: int) -> memoryview:
        """Return a tensor's bytes, in the file, once they have the digest that they were written with.

        Raises:
            CheckpointError: They have not, or the entry does not fit the file.
        """
        found = _bytes(self.tensor(index))
        if hashlib.sha256(found).hexdigest() != self.header["tensors"][index]["sha256"]:
            self._fail(f"tensor {index}", "of the digest that it was written with", "another one")
        return found

    def verify(self, watch: Callable[[int, int], None] = lambda _done, _total: None) -> list[int]:
        """Return the tensors whose bytes have another digest than when they were written; all are read.

        ``watch`` is called after each, with the number of those that are done, and of all.
        """
        wrong = []
        for index, entry in enumerate(self.header["tensors"]):
            if hashlib.sha256(_bytes(self.tensor(index))).hexdigest() != entry["sha256"]:
                wrong.append(index)
            watch(index + 1, len(self))
        return wrong
