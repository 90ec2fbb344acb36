"""The ``q4`` application: its commands, the run of one, and one clean message for every failure."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

import q4core as q4
from q4_cli.bench import bench
from q4_cli.convert import convert
from q4_cli.doctor import doctor
from q4_cli.explain import explain
from q4_cli.failure import BROKEN_PIPE, INTERRUPTED, report
from q4_cli.inspect import inspect
from q4_cli.output import warn, warnings_on_stderr
from q4_cli.quantize import quantize
from q4core.plugin_api import muted, parse_log, plugin_of_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

__all__ = ["build_app", "run"]


def _version(value: bool) -> None:  # noqa: FBT001  # an option's callback
    if value:
        python = ".".join(map(str, sys.version_info[:3]))
        typer.echo(f"q4 {q4.__version__} (torch {torch.__version__}, Python {python})")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (also Q4_DEBUG=1).")] = False,
) -> None:
    del version, debug  # a callback's; run() reads it anywhere in the command line


def build_app(registry: q4.Registry | None = None) -> typer.Typer:
    """Return the ``typer`` application: our commands, then those of the plugins.

    A plugin's command with the name of one of ours is left out with a warning, and so are all of them where typer can't
    build one. The registry defaults to the process's.
    """
    app = typer.Typer(
        name="q4",
        help="4-bit checkpoints: look into them, make them, and see what runs them here, and why.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in (doctor, inspect, explain, quantize, convert, bench):
        app.command(command.__name__)(command)
    ours = list(app.registered_commands)
    with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints while it is loaded is no part of the output
        (registry or q4.default_registry()).add_commands(app)
    for info in app.registered_commands[len(ours) :]:
        name = info.name or getattr(info.callback, "__name__", "")
        if name in {own.name for own in ours}:
            warn(f"a plugin's command {name!r} is left out: the name is taken")
            app.registered_commands.remove(info)
    try:
        typer.main.get_command(app)
    except Exception as error:  # noqa: BLE001  # the plugin boundary
        warn(f"the plugins' commands are left out, as one can't be built: {type(error).__name__}: {error}")
        app.registered_commands = ours
    return app


def run(arguments: Sequence[str], *, registry: q4.Registry | None = None) -> int:
    """Run the command line and return its exit status; nothing is raised."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    named = arguments[:end]
    debug = "--debug" in named or os.environ.get("Q4_DEBUG", "0") not in {"", "0"}
    words = [word for word in named if word != "--debug"] + list(arguments[end:]) or ["--help"]
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as in `q4 doctor >&-`
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # as long as the process
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal of few characters still works
    try:
        return _call(words, registry)
    except BrokenPipeError:
        pass
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):  # rich's and typer's own answer to a broken pipe
            return stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:  # noqa: BLE001  # the last line of defence: a message instead of a traceback
        with contextlib.suppress(BrokenPipeError, SystemExit):
            return report(error, as_json="--json" in named, with_trace=debug)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the interpreter's own last flush is quiet too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _call(words: list[str], registry: q4.Registry | None) -> int:
    is_doctor = words[0] == "doctor"
    try:
        parse_log(os.environ.get("Q4_LOG", ""))
        quiet: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    except q4.ConfigError:
        if not is_doctor:  # which lists it among the problems
            raise
        quiet = muted()
    hidden = (q4.Q4PluginWarning,) if is_doctor else ()  # doctor reports what is wrong with plugins anyway
    with quiet, _terminable(), warnings_on_stderr(*hidden):
        if registry is None and is_doctor:
            registry = q4.Registry([])  # which loads the plugins itself, once it has tried them
        elif registry is None:
            # The plugin that announces the command, alone, so that no other one can take it away by crashing.
            announced = plugin_of_command(words[0], os.environ)
            registry = q4.default_registry() if announced is None else q4.Registry([announced])
        command = typer.main.get_command(build_app(registry))
        status = command.main(args=words, prog_name="q4", standalone_mode=False)
        sys.stdout.flush()
        if status == INTERRUPTED:  # newer typers turn Ctrl-C into a status of their own
            raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Unwind on SIGTERM and SIGHUP as on Ctrl-C, so that temporary files are removed; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt  # a SystemExit would be taken for a plugin's fault

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers if signal.getsignal(number) == signal.SIG_DFL}
    try:
        yield
    except BaseException:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
