"""Makes whoever is named as ``module:function``, and keeps the name, by which another process can make the same."""

from __future__ import annotations

import importlib
from typing import Any

_MADE: list[tuple[Any, str]] = []
"""What was made and by which name: one subject for each process, so that it may stay."""


def make(name: str) -> Any:
    """Return what ``module:function`` makes, whatever that is."""
    module, _, function = name.partition(":")
    made = getattr(importlib.import_module(module), function)()
    _MADE.append((made, name))
    return made


def maker_of(item: object) -> str | None:
    """Return the ``module:function`` that made this very object, or None."""
    return next((name for made, name in _MADE if made is item), None)
