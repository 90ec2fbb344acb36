"""The ``q4`` application: its commands, the run of one, and one clean message for every failure."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from q4_cli.announced import announced, load
from q4_cli.commands import COMMANDS
from q4_cli.failure import BROKEN_PIPE, INTERRUPTED, report
from q4_cli.help import Command, Group
from q4_cli.loading import load_library
from q4_cli.output import warn, warnings_on_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

__all__ = ["build_app", "run"]

_WIDEST_HELP = 100
_ALONE = {"--version", "--install-completion", "--show-completion"}
"""Words after which no command comes."""


def _version(value: bool) -> None:  # noqa: FBT001  # an option's callback
    if value:
        python = ".".join(map(str, sys.version_info[:3]))
        core, torch = (importlib.metadata.version(name) for name in ("q4core", "torch"))  # which need not be loaded
        typer.echo(f"q4 {core} (torch {torch}, Python {python})")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (also Q4_DEBUG=1).")] = False,
) -> None:
    del version, debug  # a callback's; run() reads it anywhere in the command line


def build_app(word: str = "") -> typer.Typer:
    """Return the ``typer`` application: our commands, then those that plugins announce.

    Where ``word`` is a command, no other plugin's command is imported than that. One that has our name, can't be
    imported or can't be built is left out with a warning.
    """
    app = typer.Typer(
        name="q4",
        help="4-bit checkpoints: look into them, make them, and see what runs them here, and why.",
        epilog="`q4 COMMAND --help` has each command's options and an example. Tab completion: q4 --install-completion",
        cls=Group,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST_HELP},
    )
    app.callback()(_root)
    for command in COMMANDS:
        app.command(command.__name__, cls=Command)(_prepared(command))
    ours = {command.__name__ for command in COMMANDS}
    if word in ours | _ALONE:
        return app
    found, problems = announced(ours)
    for name, point in found.items() if word not in found else [(word, found[word])]:
        try:
            part = load(name, point, _prepared)
        except Exception as error:  # noqa: BLE001  # the plugin boundary
            problems.append(f"the command {name!r} is left out: {type(error).__name__}: {error}")
        else:
            app.registered_commands += part.registered_commands
            app.registered_groups += part.registered_groups
    for problem in problems:
        warn(problem)
    return app


def _prepared(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that first loads the library, which help, completion and usage errors do without."""

    @functools.wraps(command)
    def call(*arguments: Any, **options: Any) -> None:
        load_library()
        from q4core import ConfigError  # noqa: PLC0415  # loaded by now
        from q4core.plugin_api import muted, parse_log  # noqa: PLC0415  # as above

        quiet: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        try:
            parse_log(os.environ.get("Q4_LOG", ""))
        except ConfigError:
            if command is not COMMANDS[0]:  # doctor lists it among the problems
                raise
            quiet = muted()
        with quiet:
            command(*arguments, **options)

    return call


def run(arguments: Sequence[str]) -> int:
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
        return _call(words)
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


def _call(words: list[str]) -> int:
    with _terminable(), warnings_on_stderr():
        command = typer.main.get_command(build_app(words[0]))
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
