"""JSON files of a model folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from q4core import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is no such file.

    Raises:
        CheckpointError: The file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError("model folder", name=path.name, rule="JSON", value=str(error), where=str(path)) from error
    if not isinstance(found, dict):
        raise CheckpointError("model folder", name=path.name, rule="a JSON object", value=found, where=str(path))
    return found
