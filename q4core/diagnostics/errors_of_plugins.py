"""Exceptions of backends, as events with tracebacks and in words.

An exception holds its frames, and these all that a kernel had made. So none is stored, and what its frames hold is
released: only the text of a fault is remembered, and the next backend has the memory.
"""

from __future__ import annotations

import traceback

from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import emit


def note_fault(backend: str, error: BaseException) -> str:
    """Send what a backend raised as an event with its traceback, and return it in words, with its place."""
    text = describe_exception(error)
    emit("q4.fault", backend=backend, error=text, traceback="".join(traceback.format_exception(error)))
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if item is not None and id(item) not in seen:
            seen.add(id(item))
            traceback.clear_frames(item.__traceback__)
            waiting += [item.__cause__, item.__context__]
    return text
