"""Check for models that were split into several GGUF files: a single part is rejected."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

from q4core import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from q4_gguf.header import Header

__all__ = ["require_whole"]

_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_HINT = (
    "Split files can't be opened yet. Merge the parts first: `llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf` "
    "(of llama.cpp)."
)


def require_whole(header: Header, path: Path) -> None:
    """Reject a file that holds a part of a model.

    Its header decides; where that does not state parts (``split.count``), the file's name does
    (``name-00001-of-00002.gguf``). A merged file has a ``split.count`` of 0, and the tensors of all parts.

    Raises:
        CheckpointError: The file is one of several parts, or lacks tensors of those that its header counts.
    """

    def refuse(key: str, rule: str, value: object, hint: str) -> NoReturn:
        name = f"metadata {key!r}"
        raise CheckpointError("GGUF file", name=name, rule=rule, value=value, where=str(path), hint=hint)

    def whole_number(key: str) -> int | None:
        value = header.metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            refuse(key, "a whole number", value, "The file is damaged.")
        return value

    count, number, tensors = map(whole_number, (_COUNT, _NUMBER, _TENSORS))
    if count is None:
        found = _NAME.search(path.name)
        if found is not None and int(found[2]) > 1:
            name, rule, value = "name", "that of a whole model", f"part {int(found[1])} of {int(found[2])}"
            raise CheckpointError("GGUF file", name=name, rule=rule, value=value, where=str(path), hint=_HINT)
        return
    if count > 1:
        place = "a part" if number is None else f"part {number + 1}"
        refuse(_COUNT, "0 or 1, of a whole model", count, f"The file is {place} of {count}. {_HINT}")
    if tensors is not None and len(header.tensors) < tensors:
        refuse(_TENSORS, f"{tensors}, as the header says", len(header.tensors), _HINT)
