"""Models that are split into several GGUF files: whichever part is named, all of them are found and checked.

Reference:
    llama.cpp's ``llama-gguf-split``: the names of parts, and ``split.no``, ``split.count`` and
    ``split.tensors.count`` in the header of each. The first part has the model's metadata.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

import attrs

from q4_gguf.header import read_header
from q4_gguf.views import map_file
from q4core import CheckpointError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Collection
    from pathlib import Path

    from q4_gguf.header import Header

__all__ = ["Part", "read_parts"]

_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_HINT = (
    "Download all parts into one folder, under the names that they were published with, or merge them: "
    "`llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf` (of llama.cpp)."
)


@attrs.frozen(eq=False)
class Part:
    """One file of a model: its path, its bytes and its header."""

    path: Path
    data: mmap.mmap
    header: Header


def read_parts(path: Path, *, copy: bool = False) -> tuple[Part, ...]:
    """Return the file, or all parts of the split model that it belongs to, the first part first.

    The header decides; where that does not state parts (``split.count``), the file's name does
    (``name-00001-of-00002.gguf``). A merged file has a ``split.count`` of 0, and the tensors of all parts.

    Args:
        path: The file, or any part.
        copy: Read whole files into memory instead of mapping them.

    Raises:
        CheckpointError: A part is missing, malformed, or not of this model; a tensor is in two parts or in none.
    """
    given = _read(path, copy=copy)
    count = _whole_number(given, _COUNT)
    found = _NAME.search(path.name)
    if count is None and found is not None and int(found[2]) > 1:
        value = f"part {int(found[1])} of {int(found[2])}"
        _refuse(given.path, "name", "that of a whole model: its header names no parts", value)
    if count is None or count <= 1:
        _require_tensors(given.header.tensors.keys(), given)
        return (given,)
    place = f"part {(_whole_number(given, _NUMBER) or 0) + 1} of {count}"
    if found is None or int(found[2]) != count:
        _refuse(path, "name", f"that of {place}, such as NAME-00001-of-{count:05d}.gguf", path.name)
    stem = path.name[: found.start()]
    names = [f"{stem}-{index + 1:05d}-of-{count:05d}.gguf" for index in range(count)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        text = ", ".join(missing[:3]) + (", …" if missing[3:] else "")
        _refuse(path, "parts", f"complete, as the file is {place}", f"without {text}")
    parts = [given if name == path.name else _read(path.with_name(name), copy=copy) for name in names]
    homes: dict[str, Path] = {}
    for index, part in enumerate(parts):
        for key, wanted in ((_COUNT, count), (_NUMBER, index), (_TENSORS, _whole_number(given, _TENSORS))):
            if (stated := _whole_number(part, key)) != wanted:
                rule = f"{wanted}, as its name and the other parts say"
                _refuse(part.path, f"metadata {key!r}", rule, stated, "The file is of another model, or damaged.")
        for name in part.header.tensors:
            if name in homes:
                _refuse(part.path, "tensor name", f"unique: {homes[name].name} has it, too", name)
            homes[name] = part.path
    _require_tensors(homes.keys(), given)
    return tuple(parts)


def _read(path: Path, *, copy: bool) -> Part:
    data = map_file(path, copy=copy)
    return Part(path, data, read_header(data, str(path)))


def _refuse(path: Path, name: str, rule: str, value: object, hint: str = _HINT) -> NoReturn:
    raise CheckpointError("GGUF file", name=name, rule=rule, value=value, where=str(path), hint=hint)


def _whole_number(part: Part, key: str) -> int | None:
    value = part.header.metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        _refuse(part.path, f"metadata {key!r}", "a whole number", value, "The file is damaged.")
    return value


def _require_tensors(names: Collection[str], part: Part) -> None:
    """Refuse a model that lacks tensors that its header counts."""
    wanted = _whole_number(part, _TENSORS)
    if wanted is not None and len(names) < wanted:
        _refuse(part.path, f"metadata {_TENSORS!r}", f"{wanted}, as the header says", len(names))
