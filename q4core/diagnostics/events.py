"""Structured events: every decision as a name with fields, to the ``logging`` tree and to observers.

Events go to the standard library's logger ``"q4core"``, rendered by structlog, which is never configured globally.
Logs are quiet unless the application configures ``logging`` or ``Q4_LOG`` asks (``json`` or ``console``, and a level,
separated by commas), in which case they go to stderr. Decisions are logged at ``info``, what goes wrong at ``warning``
and ``error``, details at ``debug``. Names bound with structlog's contextvars join each line; q4core binds ``session``
and ``layer`` while it prepares a layer.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from q4core.diagnostics.describe_exception import describe_exception
from q4core.errors import PLUGIN_FAULTS, ConfigError, Q4PluginWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4core.errors import Q4Warning

    Observer = Callable[[str, dict[str, Any]], None]

LOGGER_NAME = "q4core"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FORMATS = {"json", "console"}

_observers: tuple[Callable[[], Observer | None], ...] = ()
_lock = threading.Lock()
_muted: contextvars.ContextVar[bool] = contextvars.ContextVar("q4core_muted", default=False)
_names: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("q4core_names", default={})  # noqa: B039  # never written to
"""Joins structlog's own, which take 30 ms to import."""
_warned: set[tuple[type[Warning], object]] = set()


def observe(observer: Observer) -> None:
    """Call ``observer(event, fields)`` for every event from now on, each time with fields of its own.

    A method is called for as long as its object lives. What it raises is reported once for each kind of error, as a
    ``Q4PluginWarning``; it is still called for the next event.
    """
    global _observers  # noqa: PLW0603  # one process-wide list, replaced as a whole
    reference = weakref.WeakMethod(observer) if inspect.ismethod(observer) else lambda: observer
    with _lock:
        _observers = (*(item for item in _observers if item() is not None), reference)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Send no event from this context inside the ``with`` block; warnings are still given."""
    token = _muted.set(True)
    try:
        yield
    finally:
        _muted.reset(token)


@contextlib.contextmanager
def bound(**names: str | None) -> Iterator[None]:
    """Name a session or a layer in every line logged from this context inside the ``with`` block; skip None."""
    token = _names.set({**_names.get(), **{key: name for key, name in names.items() if name is not None}})
    try:
        yield
    finally:
        _names.reset(token)


def emit(event: str, *, level: int = logging.DEBUG, **fields: Any) -> None:
    """Send one event, such as ``"q4.select"``, with its fields."""
    if _muted.get():
        return
    faults: list[tuple[Observer, BaseException]] = []
    for observer in [known for reference in _observers if (known := reference()) is not None]:
        try:
            observer(event, dict(fields))
        except PLUGIN_FAULTS as error:
            faults.append((observer, error))
    logger = _logger()
    if logger.isEnabledFor(level):
        import structlog  # noqa: PLC0415  # slow to import, and only needed once something is logged

        named = {**_names.get(), **structlog.contextvars.merge_contextvars(logger, "", dict(fields))}
        text = " ".join([event, *(f"{key}={value}" for key, value in named.items())])
        logger.log(level, text, extra={"q4_event": event, "q4_fields": named})
    # Last, when every observer has had the event: where the application makes warnings errors, this raises.
    for broken, fault in faults:
        if isinstance(fault, Q4PluginWarning):  # the observer's own warning, made an error there
            raise fault
        message = f"event observer {broken!r} raised {describe_exception(fault)}"
        warn_once((id(broken), type(fault)), Q4PluginWarning, message)


def note_fault(backend: str, error: BaseException) -> str:
    """Send what a backend raised as an event with its traceback, and return it in words, with its place.

    An exception holds its frames, and these all that a kernel had made. So none is stored, and what its frames hold is
    released: only the text of a fault is remembered, and the next backend has the memory.
    """
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


def warn_once(key: object, category: type[Q4Warning], message: str) -> None:
    """Give a ``warnings`` warning once per process for each (category, key), at the first line outside q4core."""
    with _lock:
        if (category, key) in _warned:
            return
        _warned.add((category, key))
    warnings.warn(message, category, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """Return the stack level, seen from ``warn_once``, of the first frame that is not q4core's own."""
    frame, depth = sys._getframe(1), 1  # noqa: SLF001  # the documented way to look up the stack
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "q4core":
        frame, depth = frame.f_back, depth + 1
    return depth


def parse_log(value: str) -> list[str]:
    """Return the words of ``Q4_LOG``: ``json`` or ``console``, and a level, in any order.

    Raises:
        ConfigError: A word is neither.
    """
    words = [part.strip().lower() for part in value.split(",") if part.strip()]
    if not _FORMATS | _LEVELS.keys() >= set(words):
        legal = ", ".join(sorted(_FORMATS | _LEVELS.keys()))
        what, hint = "environment variable Q4_LOG", "Correct or unset Q4_LOG."
        raise ConfigError(what, name="Q4_LOG", rule=f"words among {legal}", value=value, hint=hint)
    return words


class _EventFormatter(logging.Formatter):
    """Renders one line per event, for people or as JSON; times are ISO 8601 in UTC, to the millisecond."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        import structlog  # noqa: PLC0415  # slow to import, and only needed once something is logged

        fields: dict[str, Any] = {
            "timestamp": self.formatTime(record),
            "level": record.levelname.lower(),
            "event": getattr(record, "q4_event", record.getMessage()),
            **getattr(record, "q4_fields", {}),
        }
        if self._as_json:
            return str(structlog.processors.JSONRenderer(default=str)(None, "", fields))
        return structlog.processors.KeyValueRenderer(repr_native_str=False)(None, "", fields)


@functools.cache
def _logger() -> logging.Logger:
    """Return q4core's logger, which writes to stderr where ``Q4_LOG`` asks; errors are those of ``parse_log``."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.addHandler(logging.NullHandler())  # else the standard library prints warnings where it is not set up
    if os.environ.get("Q4_LOG"):
        words = parse_log(os.environ["Q4_LOG"])
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_EventFormatter(as_json="json" in words))
        logger.addHandler(handler)
        logger.setLevel(next((_LEVELS[word] for word in reversed(words) if word in _LEVELS), logging.INFO))
        logger.propagate = False
    return logger
