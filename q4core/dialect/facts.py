"""Notes that keep what only a dialect's writer needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from q4core.weight import PackedWeight

__all__ = ["read_fact", "stored_fact"]


def stored_fact(key: str, value: Any) -> str:
    """Return a note that keeps a stored detail that only the dialect's writer needs; ``read_fact`` reads it."""
    return f"stored {key}: {json.dumps(value)}"


def read_fact(weight: PackedWeight, key: str) -> Any:
    """Return the detail that ``stored_fact`` kept, or None."""
    head = f"stored {key}: "
    return next((json.loads(note[len(head) :]) for note in weight.notes if note.startswith(head)), None)
