"""The diagnostics events of a block of code, as the ``logging`` tree carries them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from typing import TYPE_CHECKING, Any

import attrs

from q4core import Q4FallbackWarning, Q4ProbeWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOGGER = "q4core"
_RECORDED = (Q4FallbackWarning, Q4ProbeWarning)
_counter = itertools.count(1)


def unique(text: str) -> str:
    """Return a text that no other call gave, so that what is reported once per text is reported."""
    return f"{text} #{next(_counter)}"


@attrs.define
class Recording:
    """The (name, fields) of every event, and every warning of the recorded classes."""

    events: list[tuple[str, dict[str, Any]]] = attrs.field(factory=list)
    warned: list[warnings.WarningMessage] = attrs.field(factory=list)

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of every event of one name."""
        return [fields for event, fields in self.events if event == name]

    def of(self, category: type[Warning]) -> list[str]:
        """Return the messages of every warning of one class."""
        return [str(item.message) for item in self.warned if issubclass(item.category, category)]


class _Handler(logging.Handler):
    def __init__(self, recording: Recording) -> None:
        super().__init__(logging.DEBUG)
        self._recording = recording

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "q4_event", None)
        if event is not None:
            self._recording.events.append((event, dict(getattr(record, "q4_fields", {}))))


@contextlib.contextmanager
def _detached(level: int) -> Iterator[logging.Logger]:
    """Let q4core's logger have another level, and pass nothing on, inside the ``with`` block."""
    logger = logging.getLogger(_LOGGER)
    before = logger.level, logger.propagate
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Suppress events and fallback and probe warnings while a case runs; nothing of them is stored.

    A case of ten thousand calls would otherwise find the memory that its own recording takes.
    """
    with _detached(logging.CRITICAL), warnings.catch_warnings():
        for category in _RECORDED:
            warnings.simplefilter("ignore", category)
        yield


@contextlib.contextmanager
def recorded(*further: type[Warning]) -> Iterator[Recording]:
    """Record events and warnings, also of ``further`` classes; other warnings are given again at the end."""
    recording = Recording()
    handler = _Handler(recording)
    with _detached(logging.DEBUG) as logger:
        logger.addHandler(handler)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                yield recording
        finally:
            logger.removeHandler(handler)
    wanted: tuple[type[Warning], ...] = (*_RECORDED, *further)
    for item in warned:
        if issubclass(item.category, wanted):
            recording.warned.append(item)
        else:
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)
