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
from q4_cli.output import clean, make_console, say, say_first, to_plain
from q4core.plugin_api import closest_name

__all__ = ["BAD_INPUT", "BROKEN_PIPE", "CANT_SERVE", "INTERRUPTED", "Failure", "describe", "tell"]

CANT_SERVE = 1
BAD_INPUT = 2
FAULT = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

_BROUGHT_BY = {"conform": "q4-conformance", "generate": "q4-nn"}
"""Documented command → the distribution whose plugin adds it."""
_SHORT_OF = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENOMEM, errno.EMFILE}


@attrs.frozen
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
        return Failure("interrupted", "interrupted; nothing was left half-written", INTERRUPTED)
    if hasattr(error, "format_message"):  # typer's own: an option that does not exist, a number that is none
        return _of_usage(error)
    if isinstance(error, MemoryError):
        return Failure("memory", f"not enough memory: {error}".rstrip(": "), CANT_SERVE)
    if isinstance(error, OSError):
        where = None if error.filename is None else str(error.filename)
        return Failure("system", str(error), CANT_SERVE, {"where": where})
    hint = "This is a fault of q4core or of a plugin; Q4_DEBUG=1 shows where."
    return Failure("internal", f"{type(error).__name__}: {error}", FAULT, {"hint": hint})


def _of_usage(error: Any) -> Failure:
    message, context = str(error.format_message()), getattr(error, "ctx", None)
    hint = f"Try '{context.command_path} --help'." if context is not None else None
    unknown = re.match(r"(No such command '([^']*)'\.)(.*)", message)
    if unknown and unknown[2] in _BROUGHT_BY:
        message, brings = unknown[1], _BROUGHT_BY[unknown[2]]
        hint = f"{brings} brings it: python3 -m pip install {brings}"
        if _is_installed(brings):
            hint = f"{brings} brings it and is not loaded; `q4 doctor` says why."
    elif unknown and not unknown[3] and context is not None:  # newer typers name the closest one themselves
        close = closest_name(unknown[2], context.command.list_commands(context))
        hint = f"Did you mean {close!r}? {hint}" if close else hint
    return Failure("usage", message, BAD_INPUT, {"hint": hint})


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _of_q4(error: q4.Q4Error) -> Failure:
    cause = error.__cause__
    if isinstance(error, q4.CheckpointError) and isinstance(cause, OSError) and cause.errno in _SHORT_OF:
        status = CANT_SERVE
    elif isinstance(error, q4.UnknownBackendError):
        status = BAD_INPUT
    else:
        cant_serve = isinstance(error, (q4.BackendError, q4.PluginError, q4.UnifiedMemoryError))
        status = CANT_SERVE if cant_serve else BAD_INPUT
    details = dict(error.details)
    for name in ("problems", "available", "closest", "attributes"):
        if hasattr(error, name):
            details[name] = getattr(error, name)
    if isinstance(error, q4.BackendUnavailableError):
        details["rejections"] = [item.to_dict() for item in error.rejections]
    fields = {name: getattr(error, name) for name in ("what", "name", "rule", "value", "where", "hint")}
    if not isinstance(error.value, (type(None), bool, int, float, str)):  # whatever JSON can't say in full
        fields["value"] = repr(error.value)
    return Failure(error.code, str(error), status, to_plain({**fields, "details": details}))


def tell(error: BaseException, *, as_json: bool, with_trace: bool) -> int:
    """Write what to tell about an exception, JSON to stdout or text to stderr, and return the exit status."""
    failure = describe(error)
    if with_trace:
        sys.stderr.write("".join(traceback.format_exception(error)))
    if as_json:
        sys.stdout.write(json.dumps(to_plain(failure.to_dict()), indent=2) + "\n")
        sys.stdout.flush()
        return failure.status
    head, *lines = clean(failure.message).split("\n")
    hint = failure.fields.get("hint")
    if isinstance(hint, str) and head.endswith(f" {clean(hint)}"):
        head = head.removesuffix(f" {clean(hint)}")
    console = make_console(sys.stderr)
    say(console, Text.assemble((f"[{failure.code}] ", "red"), head), label=Text("error ", style="bold red"))
    say_first(console, [line.strip() for line in lines], label="  ", style="")
    if hint:
        say(console, clean(hint), label=Text("hint  ", style="bold"))
    return failure.status
