"""What a test hears of the core: its events, and warnings that are given once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from q4core.diagnostics import events as core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["forget_warnings", "heard", "observed_by"]


def forget_warnings() -> None:
    """Let every warning that is given once be given again."""
    core._warned.clear()


@contextlib.contextmanager
def observed_by(*observers: Callable[[str, dict[str, Any]], None]) -> Iterator[None]:
    """Call observers for every event that is sent inside the block."""
    for observer in observers:
        core.observe(observer)
    try:
        yield
    finally:
        core._observers = tuple(item for item in core._observers if item() not in observers)


@contextlib.contextmanager
def heard(*names: str) -> Iterator[list[dict[str, Any]]]:
    """Collect the fields of the events of these names that are sent inside the block; ``event`` is the name."""
    events: list[dict[str, Any]] = []

    def note(event: str, fields: dict[str, Any]) -> None:
        if event in names:
            events.append({"event": event, **fields})

    with observed_by(note):
        yield events
