"""JSON files of a model folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core.plugin_api import read_object

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is no such file.

    Raises:
        CheckpointError: The file can't be read, or holds something else.
    """
    return read_object(path, path.name) if path.is_file() else {}
