"""What the user is told when a command fails: one clean message, or one JSON object, and an exit status."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import re
import sys
import traceback
from typing import Any

import attrs
from rich.text import Text

import q4core as q4
from q4_cli.output import clean, make_console, say, to_plain
from q4core.plugin_api import closest_name

__all__ = ["BAD_INPUT", "BROKEN_PIPE", "CANT_SERVE", "FAULT", "INTERRUPTED", "Failure", "describe", "tell"]

CANT_SERVE = 1
BAD_INPUT = 2
FAULT = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

_BROUGHT_BY = {"conform": "q4-conformance", "generate": "q4-nn"}
"""Documented command → the distribution whose plugin adds it."""
_MOST_LINES = 20
_SHORT_OF = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENOMEM, errno.EMFILE}


@attrs.frozen(kw_only=True)
class Failure:
    """One failed command.

    Args:
        code: The error's stable code; ``usage``, ``system``, ``memory``, ``interrupted`` or ``internal`` for what is
            no ``Q4Error``.
        message: What to tell, possibly with further lines.
        status: The exit status.
        fields: what, name, rule, value, where, hint, details.
    """

    code: str
    message: str
    status: int
    fields: dict[str, Any] = attrs.field(factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        empty = dict.fromkeys(("what", "name", "rule", "value", "where", "hint"))
        return {"error": {"code": self.code, "message": self.message, **empty, "details": {}, **self.fields}}


def describe(error: BaseException) -> Failure:
    """Return what to tell about an exception."""
    if isinstance(error, q4.Q4Error):
        return _of_q4(error)
    if isinstance(error, (KeyboardInterrupt, EOFError)) or type(error).__name__ == "Abort":
        return Failure(code="interrupted", message="interrupted; nothing was left half-written", status=INTERRUPTED)
    format_message = getattr(error, "format_message", None)
    if callable(format_message):  # typer's own: an option that does not exist, a number that is none
        return _of_usage(error, str(format_message()))
    if isinstance(error, MemoryError):
        return Failure(code="memory", message=f"not enough memory: {error}".rstrip(": "), status=CANT_SERVE)
    if isinstance(error, OSError):
        fields = {"where": None if error.filename is None else str(error.filename)}
        return Failure(code="system", message=str(error), status=CANT_SERVE, fields=fields)
    return Failure(
        code="internal",
        message=f"{type(error).__name__}: {error}",
        status=FAULT,
        fields={"hint": "This is a fault of q4core or of a plugin; Q4_DEBUG=1 shows where."},
    )


def _of_usage(error: BaseException, message: str) -> Failure:
    context: Any = getattr(error, "ctx", None)
    hint = f"Try '{context.command_path} --help'." if context is not None else None
    absent = re.match(r"No such command '([^']*)'\.", message)
    if absent and absent[1] in _BROUGHT_BY:
        return Failure(
            code="usage", message=absent[0], status=BAD_INPUT, fields={"hint": _way_to(_BROUGHT_BY[absent[1]])}
        )
    unknown = re.match(r"No such command '(.*)'\.$", message)  # newer typers name the closest one themselves
    if unknown and context is not None:
        close = closest_name(unknown[1], context.command.list_commands(context))
        hint = f"Did you mean {close!r}? {hint}" if close else hint
    return Failure(code="usage", message=message, status=BAD_INPUT, fields={"hint": hint})


def _way_to(distribution: str) -> str:
    if _is_installed(distribution):
        return f"{distribution} brings it and is not loaded; `q4 doctor` says why."
    return f"{distribution} brings it: python3 -m pip install {distribution}"


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _of_q4(error: q4.Q4Error) -> Failure:
    cause = error.__cause__
    lacking = isinstance(cause, OSError) and cause.errno in _SHORT_OF
    refused = isinstance(error, (q4.BackendError, q4.PluginError, q4.UnifiedMemoryError))
    served = not refused or isinstance(error, q4.UnknownBackendError)
    status = BAD_INPUT if served and not (lacking and isinstance(error, q4.CheckpointError)) else CANT_SERVE
    details = dict(error.details)
    for name in ("problems", "available", "closest", "attributes"):
        if hasattr(error, name):
            details[name] = getattr(error, name)
    if isinstance(error, q4.BackendUnavailableError):
        details["rejections"] = [item.to_dict() for item in error.rejections]
    fields = {name: getattr(error, name) for name in ("what", "name", "rule", "value", "where", "hint")}
    fields["value"] = _value(error.value)
    return Failure(code=error.code, message=str(error), status=status, fields={**fields, "details": to_plain(details)})


def _value(value: object) -> Any:
    """Return a value as JSON has it where that says all, else its repr."""
    plain = isinstance(value, (type(None), bool, int, float, str))
    return to_plain(value) if plain else repr(value)


def tell(failure: Failure, *, as_json: bool) -> None:
    """Write a failure: JSON to stdout, text to stderr."""
    if as_json:
        sys.stdout.write(json.dumps(to_plain(failure.to_dict()), indent=2) + "\n")
        sys.stdout.flush()
        return
    head, *lines = clean(failure.message).split("\n")
    hint = failure.fields.get("hint")
    if isinstance(hint, str) and head.endswith(f" {clean(hint)}"):
        head = head.removesuffix(f" {clean(hint)}")
    console = make_console(sys.stderr)
    say(console, Text.assemble((f"[{failure.code}] ", "red"), head), label=Text("error ", style="bold red"))
    for line in lines[:_MOST_LINES]:
        say(console, line.strip(), label="  ")
    if len(lines) > _MOST_LINES:
        say(console, f"… and {len(lines) - _MOST_LINES} more; --json lists all", label="  ")
    if hint:
        say(console, clean(hint), label=Text("hint  ", style="bold"))


def tell_trace(error: BaseException) -> None:
    """Write the traceback to stderr, for ``Q4_DEBUG``."""
    sys.stderr.write("".join(traceback.format_exception(error)))
