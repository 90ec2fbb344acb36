"""The one place that decides what goes where: tables on a terminal, or exactly one JSON document alone on stdout.

Progress, warnings, logs and whatever a library prints go to stderr; under ``--json`` that holds for the file descriptor
too, so that a compiler which a backend starts can't write into the document.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import attrs
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Output", "clean", "make_console", "open_output", "say", "to_plain", "warnings_on_stderr"]

_PIPE_WIDTH = 1 << 14
"""Columns when the output is no terminal: nothing is cut, so that grep finds whole names."""


class _Console(Console):
    """A console that lets a broken pipe through, for ``run`` to end quietly."""

    def on_broken_pipe(self) -> NoReturn:
        """Tell ``run`` about it."""
        raise BrokenPipeError


def make_console(file: TextIO) -> Console:
    """Return a console on a stream; plain where that is no terminal, and without any style under ``NO_COLOR``."""
    console = _Console(file=file, markup=False, highlight=False, emoji=False, soft_wrap=False, legacy_windows=False)
    if os.environ.get("NO_COLOR"):
        console = _Console(file=file, markup=False, highlight=False, emoji=False, color_system=None)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = _PIPE_WIDTH
    return console


def say(console: Console, text: Text | str, *, label: Text | str = "") -> None:
    """Print a line; where the terminal is narrow it breaks between words, and goes on under its own beginning."""
    head = label if isinstance(label, Text) else Text(label)
    if not head:
        console.print(text if isinstance(text, Text) else Text(text))
        return
    line = Table.grid(padding=0)
    line.add_column(no_wrap=True, width=head.cell_len)
    line.add_column(overflow="fold")
    line.add_row(head, text if isinstance(text, Text) else Text(text))
    console.print(line)


def clean(text: object) -> str:
    """Return text with control characters written out: a name in a file must not steer the terminal."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in str(text)
    )


def to_plain(value: Any) -> Any:  # noqa: PLR0911  # one line per kind of value
    """Return plain lists, texts and numbers, ready for JSON; what JSON can't say (NaN, infinity) becomes None."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (torch.device, PurePath)):
        return str(value)
    if attrs.has(type(value)):
        return {field.name: to_plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((to_plain(item) for item in value), key=str)
    if isinstance(value, Iterable) and not isinstance(value, (bytes, torch.Tensor)):
        return [to_plain(item) for item in value]
    return str(value)


class Output:
    """Where one command writes.

    Args:
        document_file: The real stdout.
        as_json: Whether the answer is a JSON document.
    """

    def __init__(self, document_file: TextIO, *, as_json: bool) -> None:
        self.as_json = as_json
        self._file = document_file
        self._side = make_console(sys.stderr)

    def answer(self, record: Mapping[str, Any], show: Callable[[Console], None]) -> None:
        """Write the command's answer: ``record`` as JSON, or what ``show`` prints."""
        if self.as_json:
            # ASCII escapes are valid whatever the encoding of the pipe, and whatever a file name holds.
            self._file.write(json.dumps(to_plain(record), indent=2, allow_nan=False) + "\n")
            self._file.flush()
        else:
            show(make_console(self._file))

    def note(self, text: str) -> None:
        """Write a line for people to stderr."""
        self._side.print(Text(clean(text), style="dim"))

    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[str], None]]:
        """Show a progress bar on stderr where that is a terminal; call what it gives after each step, with a name."""
        if not self._side.is_terminal:
            yield lambda _: None
            return
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[item]}", markup=False, style="dim"),
            console=self._side,
            transient=True,
        )
        with bar:
            task = bar.add_task(label, total=total, item="")
            yield lambda item: bar.update(task, advance=1, item=clean(item))


@contextlib.contextmanager
def open_output(*, as_json: bool) -> Iterator[Output]:
    """Give a command its output; under ``--json`` whatever else is written to stdout goes to stderr meanwhile."""
    if not as_json:
        yield Output(sys.stdout, as_json=False)
        return
    with contextlib.ExitStack() as stack:
        file = _own_descriptor(stack) or sys.stdout
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield Output(file, as_json=True)


def _own_descriptor(stack: contextlib.ExitStack) -> TextIO | None:
    """Keep the real stdout for the document and let descriptor 1 be stderr; None where stdout is no descriptor."""
    try:
        number, errors = sys.stdout.fileno(), sys.stderr.fileno()
        sys.stdout.flush()
        kept = os.dup(number)
    except (OSError, ValueError, AttributeError):
        return None
    file = os.fdopen(kept, "w", encoding="utf-8")
    stack.callback(file.close)
    os.dup2(errors, number)
    stack.callback(os.dup2, kept, number)
    return file


@contextlib.contextmanager
def warnings_on_stderr(*hidden: type[Warning]) -> Iterator[None]:
    """Show warnings as one clean line on stderr instead of a line of source code, but for the hidden kinds."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if not issubclass(category, hidden):
            say(make_console(sys.stderr), clean(message), label=Text("warning ", style="yellow"))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
