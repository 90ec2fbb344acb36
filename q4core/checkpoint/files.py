"""Files of checkpoints: regular ones alone, and JSON read strictly."""

from __future__ import annotations

import collections
import json
import mmap
import os
import stat
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from q4core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}
_MAX_JSON_BYTES = 200_000_000
_SIDECARS = {"hf_quant_config.json": "", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""A quantiser's own file → the method that it speaks of; ModelOpt's names the method itself."""
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def require_regular(path: Path, *, or_folder: bool = False) -> None:
    """Check that a path leads to a regular file, or to a folder where that is allowed; links are followed.

    Nothing is opened: a pipe or a device would make a reader wait.

    Raises:
        CheckpointError: It leads to something else, or nowhere.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(path, error) from error
    if not stat.S_ISREG(mode) and not (or_folder and stat.S_ISDIR(mode)):
        rule, kind = "a regular file or a folder" if or_folder else "a regular file", _KINDS.get(stat.S_IFMT(mode))
        hint = "A checkpoint is mapped into memory, which works with files alone; save it to one first."
        facts = {"value": kind or "something else", "where": str(path), "hint": hint}
        raise CheckpointError("checkpoint", name="path", rule=rule, **facts)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises:
        CheckpointError: It is not one, or the system won't give it.
    """
    require_regular(path)
    try:
        # Should it have become a pipe since: opened without waiting for a writer, it is found to be empty.
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AT_ONCE))
    except OSError as error:
        raise unreadable(path, error) from error


def map_privately(file: BinaryIO) -> mmap.mmap:
    """Map a file: reading costs page cache alone, and writing into the mapping never reaches the file.

    Raises:
        OSError: The system won't map it.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    # torch wants writable memory. Without MAP_NORESERVE the kernel counts a private writable mapping as if all of it
    # were going to be written, and refuses a file larger than the machine's memory.
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def is_there(path: Path) -> bool:
    """Return whether a path leads to anything; a ``CheckpointError`` says that the system won't say."""
    try:
        return path.exists()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that the system won't give."""
    reason = getattr(error, "strerror", None) or str(error)
    return CheckpointError("checkpoint", name="file", rule="readable", value=reason, where=str(path))


def parse_json(text: bytes, *, what: str, where: str) -> Any:
    """Return JSON, read strictly: no key twice in an object, no NaN, no endless nesting.

    Raises:
        CheckpointError: The text is not such JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = ", ".join(
                repr(key) for key, times in collections.Counter(key for key, _ in pairs).items() if times > 1
            )
            raise CheckpointError(what, name=f"key {twice}", rule="there once", value="a duplicate", where=where)
        return found

    def refuse(constant: str) -> NoReturn:
        raise CheckpointError(what, name="JSON", rule="without NaN and Infinity", value=constant, where=where)

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(what, name="JSON", rule="valid UTF-8 JSON", value=str(error), where=where) from error


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        CheckpointError: The file can't be read or holds something else.
    """
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(text) > _MAX_JSON_BYTES:
        rule, size = f"at most {_MAX_JSON_BYTES} bytes", path.stat().st_size
        raise CheckpointError(what, name="size", rule=rule, value=size, where=str(path))
    found = parse_json(text, what=what, where=str(path))
    if not isinstance(found, dict):
        rule = f"an object, as {what}"
        raise CheckpointError("checkpoint", name="JSON", rule=rule, value=type(found).__name__, where=str(path))
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's ``config.json``, or {}.

    Where it says nothing of quantisation, a file of the quantiser's own speaks for it: ModelOpt's
    ``hf_quant_config.json``, AutoGPTQ's ``quantize_config.json`` or AutoAWQ's ``quant_config.json``.

    Raises:
        CheckpointError: One of the files is malformed.
    """
    path = folder / "config.json"
    config = read_object(path, "config.json") if is_there(path) else {}
    sidecar = next((name for name in _SIDECARS if is_there(folder / name)), None)
    if "quantization_config" in config or sidecar is None:
        return config
    found = read_object(folder / sidecar, sidecar)
    method: Any = _SIDECARS[sidecar]
    if not method:
        inner, producer = found.get("quantization"), found.get("producer")
        method = producer.get("name") if isinstance(producer, dict) else None
        found = inner if isinstance(inner, dict) and isinstance(method, str) else {}
    return {**config, "quantization_config": {"quant_method": method, **found}} if found else config
