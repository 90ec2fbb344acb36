"""Puts the ``q4`` command together, runs it, and turns whatever goes wrong into one clean message."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from q4core.cli.failure import BROKEN_PIPE, INTERRUPTED, describe, tell, tell_trace
from q4core.cli.output import clean, make_console, say, warnings_on_stderr
from q4core.discovery import plugin_of_command
from q4core.errors import Q4PluginWarning
from q4core.registry import Registry, default_registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

__all__ = ["build_app", "run"]

PLUGIN_LIMIT_S = 30.0
"""How long ``q4 doctor`` waits for one plugin's import, or one hook of it."""
_HELP = "4-bit checkpoints: look into them, make them, and see what runs them here, and why."


def _version(value: bool) -> None:  # noqa: FBT001  # an option's callback
    if value:
        import torch  # noqa: PLC0415  # as below

        from q4core import __version__  # noqa: PLC0415  # the face imports everything below it

        python = ".".join(map(str, sys.version_info[:3]))
        typer.echo(f"q4 {__version__} (torch {torch.__version__}, Python {python})")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (also Q4_DEBUG=1).")] = False,
) -> None:
    del version, debug  # a callback's, and taken by run() wherever it stands


def build_app(registry: Registry | None = None) -> typer.Typer:
    """Return the ``typer`` application: our commands, then those of the plugins.

    Args:
        registry: The plugins to ask; the process's unless told.
    """
    from q4core.cli import bench, convert, doctor, explain, inspect, quantize  # noqa: PLC0415  # each needs typer

    app = typer.Typer(
        name="q4",
        help=_HELP,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command("doctor")(doctor.doctor)
    app.command("inspect")(inspect.inspect)
    app.command("explain")(explain.explain)
    app.command("quantize")(quantize.quantize)
    app.command("convert")(convert.convert)
    app.command("bench")(bench.bench)
    _add_plugin_commands(app, registry or default_registry())
    return app


def _add_plugin_commands(app: typer.Typer, registry: Registry) -> None:
    """Let plugins add commands; one that takes a name of ours, or that typer can't build, is left out with a word."""
    own = list(app.registered_commands)
    with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints while it is loaded is no part of an answer
        registry.add_commands(app)
    taken = {_name_of(info) for info in own}
    kept = list(own)
    for info in app.registered_commands[len(own) :]:
        name = _name_of(info)
        fault = f"the name {name!r} is taken" if name in taken else _fault_of(info)
        if fault is None:
            kept.append(info)
            taken.add(name)
        else:
            line = f"a plugin's command {name!r} is left out: {clean(fault)}"
            say(make_console(sys.stderr), line, label="warning ")
    app.registered_commands = kept


def _name_of(info: Any) -> str:
    name = info.name or getattr(info.callback, "__name__", "")
    return str(name).lower().replace("_", "-")


def _fault_of(info: Any) -> str | None:
    """Say why typer can't build a command, or None: one bad signature must not take every command away."""
    probe = typer.Typer()
    probe.registered_commands = [info]
    try:
        typer.main.get_command(probe)
    except Exception as error:  # noqa: BLE001  # the plugin boundary
        return f"{type(error).__name__}: {error}"
    return None


def run(arguments: Sequence[str], *, registry: Registry | None = None) -> int:
    """Run the command line and return its exit status; nothing is raised."""
    before, after = _split(list(arguments))
    debug = "--debug" in before or os.environ.get("Q4_DEBUG", "0") not in {"", "0"}
    words = [word for word in before if word != "--debug"] + after or ["--help"]
    as_json = "--json" in before
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as in `q4 doctor >&-`
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # as long as the process
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal of few characters still works
    # What is wrong with plugins is what doctor tells anyway.
    hidden = (Q4PluginWarning,) if words[0] == "doctor" else ()
    try:
        with _terminable(), warnings_on_stderr(*hidden):
            plugins = registry or _registry_of(words[0]) or default_registry()
            if words[0] == "doctor":
                plugins.time_limit_s = PLUGIN_LIMIT_S
            command = typer.main.get_command(build_app(plugins))
            status = command.main(args=words, prog_name="q4", standalone_mode=False)
            sys.stdout.flush()
    except BrokenPipeError:
        return _quiet_pipe()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer's own answer to a broken pipe
            return _quiet_pipe()
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:  # noqa: BLE001  # the last line of defence: a message instead of a traceback
        return _fail(error, as_json=as_json, debug=debug)
    if status == INTERRUPTED:  # newer typers turn Ctrl-C into a status of their own
        return _fail(KeyboardInterrupt(), as_json=as_json, debug=debug)
    return status if isinstance(status, int) else 0


def _registry_of(word: str) -> Registry | None:
    """Return the plugin that announces a command, alone, so that no other one can take the command away by crashing."""
    found = plugin_of_command(word, os.environ)
    return None if found is None else Registry([found])


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut:]


def _fail(error: BaseException, *, as_json: bool, debug: bool) -> int:
    failure = describe(error)
    if debug:
        tell_trace(error)
    try:
        tell(failure, as_json=as_json)
    except BrokenPipeError:
        return _quiet_pipe()
    return failure.status


def _quiet_pipe() -> int:
    """Let nothing more be written, the interpreter's own last flush included."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C, so that temporary files go; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers if signal.getsignal(number) == signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
