"""Reports of failed commands: one clean message or one JSON object, and an exit status."""

from __future__ import annotations

import difflib
import errno
import json
import re
import sys
import traceback
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from q4_cli.output import make_console, say, say_first, to_plain

if TYPE_CHECKING:
    import q4core

__all__ = ["BAD_INPUT", "BROKEN_PIPE", "CANT_SERVE", "INTERRUPTED", "describe", "report"]

CANT_SERVE = 1
BAD_INPUT = 2
FAULT = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

_LM = ("cache", "chat", "embed", "generate", "perplexity", "prepare")
_PROVIDERS = {"conform": "q4-conformance", **dict.fromkeys(_LM, "q4-lm")}
"""Documented command → the distribution whose plugin adds it."""
_OPTIONS = {"compute_dtype": "dtype", "compute_path": "compute-path", "activation_precision": "precision"}
"""Field of a configuration → the option that asks for it."""
_SHORT_OF = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENOMEM, errno.EMFILE}


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the exit status for an exception, and its description, ready for JSON.

    It has a stable ``code`` (``usage``, ``system``, ``memory``, ``interrupted`` or ``internal`` for what is no
    ``Q4Error``), ``message``, ``what``, ``name``, ``rule``, ``value``, ``where``, ``hint`` and ``details``.
    """
    library = sys.modules.get("q4core")  # not loaded for what is wrong with the command line
    if library is not None and isinstance(error, library.Q4Error):
        return _describe_own(error)
    if isinstance(error, (KeyboardInterrupt, EOFError)) or type(error).__name__ == "Abort":
        where = f" {error}" if str(error) else ""
        return INTERRUPTED, _document("interrupted", f"interrupted{where}; nothing was left half-written")
    if hasattr(error, "format_message"):  # typer's own: an option that does not exist, a number that is none
        return BAD_INPUT, _describe_usage(error)
    if isinstance(error, MemoryError):
        return CANT_SERVE, _document("memory", f"not enough memory: {error}".rstrip(": "))
    if isinstance(error, OSError):
        return CANT_SERVE, _document(
            "system", str(error), where=None if error.filename is None else str(error.filename)
        )
    hint = "Report it with what Q4_DEBUG=1 shows: it is a fault of q4core or of a plugin."
    return FAULT, _document("internal", f"{type(error).__name__}: {error}", hint=hint)


def _document(code: str, message: str, **fields: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("what", "name", "rule", "value", "where", "hint"))
    return {"code": code, "message": message, **empty, "details": {}, **fields}


def _describe_usage(error: Any) -> dict[str, Any]:
    message, context = str(error.format_message()), getattr(error, "ctx", None)
    hint = f"Try '{context.command_path} --help'." if context is not None else None
    unknown = re.match(r"(No such command '([^']*)'\.)(.*)", message)
    if unknown and unknown[2] in _PROVIDERS:
        message, provider = unknown[1], _PROVIDERS[unknown[2]]
        hint = f"{provider} provides it: python3 -m pip install {provider}"
        if find_spec(provider.replace("-", "_")):
            hint = f"{provider} provides it and is not loaded; `q4 doctor` says why."
    elif unknown and not unknown[3] and context is not None:  # newer typers name the closest one themselves
        close = difflib.get_close_matches(unknown[2], context.command.list_commands(context), n=1)
        hint = f"Did you mean {close[0]!r}? {hint}" if close else hint
    return _document("usage", message, hint=hint)


def _describe_own(error: q4core.Q4Error) -> tuple[int, dict[str, Any]]:
    import q4core as q4  # noqa: PLC0415  # whose error it is, so that it is loaded

    if isinstance(error, q4.ConfigError) and error.what == "configuration":  # made of what the user typed
        name = "--" + _OPTIONS.get(str(error.name), str(error.name))
        close = difflib.get_close_matches(str(error.value), re.findall(r"'([^']+)'", str(error.rule)), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else error.hint
        error = q4.ConfigError("option", name=name, rule=error.rule, value=error.value, hint=hint)
    cause = error.__cause__
    is_short = isinstance(error, q4.CheckpointError) and isinstance(cause, OSError) and cause.errno in _SHORT_OF
    is_refused = isinstance(error, (q4.BackendError, q4.PluginError, q4.UnifiedMemoryError))
    status = CANT_SERVE if is_short or (is_refused and not isinstance(error, q4.UnknownBackendError)) else BAD_INPUT
    details = dict(error.details)
    for name in ("problems", "available", "closest", "attributes"):
        if hasattr(error, name):
            details[name] = getattr(error, name)
    if isinstance(error, q4.BackendUnavailableError):
        details["rejections"] = [item.to_dict() for item in error.rejections]
    fields = {name: getattr(error, name) for name in ("what", "name", "rule", "value", "where", "hint")}
    if not isinstance(error.value, (type(None), bool, int, float, str)):  # what JSON can't represent in full
        fields["value"] = repr(error.value)
    return status, to_plain(_document(error.code, str(error), **fields, details=details))


def report(error: BaseException, *, as_json: bool, with_trace: bool) -> int:
    """Write the description of an exception, JSON to stdout or text to stderr, and return the exit status."""
    status, found = describe(error)
    if with_trace:
        sys.stderr.write("".join(traceback.format_exception(error)))
    if as_json:
        sys.stdout.write(json.dumps({"error": found}, indent=2) + "\n")
        sys.stdout.flush()
        return status
    head, *lines = found["message"].split("\n")
    console, hint = make_console(sys.stderr), found["hint"]
    say(console, (f"[{found['code']}] ", "red"), head.removesuffix(f" {hint}"), label=("error ", "bold red"))
    say_first(console, [line.strip() for line in lines], label="  ", style="")
    if hint:
        say(console, hint, label=("hint  ", "bold"))
    return status
