"""Python functions that a call enters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["functions_entered"]


def functions_entered(call: Callable[[], object], *packages: str) -> list[str]:
    """Return the Python functions that a call enters, in order, as module and name; comprehensions are none.

    Args:
        call: Is called once.
        packages: Beginnings of the names of modules whose functions count. Defaults to all.
    """
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if event == "call" and not name.startswith("<") and module.startswith(packages or ""):
            entered.append(f"{module}.{name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered
