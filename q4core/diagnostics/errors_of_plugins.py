"""Exceptions of backends: as events with tracebacks, and as the cause of the error that follows from them.

An exception holds its frames, and these all that a kernel had made. So it is kept no longer than the call that it
broke, and without what its frames hold: what is remembered of a fault is its words.
"""

from __future__ import annotations

import contextlib
import contextvars
import traceback
from typing import TYPE_CHECKING

from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import emit
from q4core.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_raised: contextvars.ContextVar[list[tuple[str, BaseException]] | None] = contextvars.ContextVar(
    "q4core_raised", default=None
)


@contextlib.contextmanager
def chained() -> Iterator[None]:
    """Chain a ``BackendUnavailableError`` that leaves the ``with`` block to the first fault that it tells of."""
    if _raised.get() is not None:  # an outer block hears of all
        yield
        return
    faults: list[tuple[str, BaseException]] = []
    token = _raised.set(faults)
    try:
        yield
    except BackendUnavailableError as error:
        concerned = {rejection.backend for rejection in error.rejections}
        if error.__cause__ is None:
            error.__cause__ = next((fault for name, fault in faults if name in concerned), None)
        raise
    finally:
        _raised.reset(token)
        faults.clear()


def note_fault(backend: str, error: BaseException) -> str:
    """Take note of what a backend raised, and return it in words, with its place.

    What its frames hold is let go, so that there is room for the next backend.
    """
    told = describe_exception(error)
    emit("q4.fault", backend=backend, error=told, traceback="".join(traceback.format_exception(error)))
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if item is not None and id(item) not in seen:
            seen.add(id(item))
            traceback.clear_frames(item.__traceback__)
            waiting += [item.__cause__, item.__context__]
    faults = _raised.get()
    if faults is not None:
        faults.append((backend, error))
    return told
