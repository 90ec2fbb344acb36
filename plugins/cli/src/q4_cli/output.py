"""Output of the commands: tables on a terminal, or exactly one JSON document alone on stdout.

Progress, warnings, logs and what libraries print go to stderr.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import itertools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TextIO

import attrs
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Part = str | tuple[str, str]
    """A text, or a text and its style."""

__all__ = [
    "NO_LAYER",
    "Output",
    "bytes_text",
    "clean",
    "first_of",
    "make_console",
    "natural_key",
    "open_output",
    "print_table",
    "say",
    "say_first",
    "say_path",
    "say_unread",
    "to_plain",
    "unread_types",
    "warn",
    "warnings_on_stderr",
]

_PIPE_WIDTH = 1 << 14
"""Columns when the output is no terminal: nothing is cut, so that grep finds whole names."""
_MOST_ROWS = 2000
"""Rows of a table at most."""
_MOST_LINES = 20
_INSTEAD = "pack the original weights by `q4 quantize`, or take a file in a format that `q4 doctor` lists"
_LEAST_NAME = 16
_GAP = 2
"""Cells between columns."""


def make_console(file: TextIO) -> Console:
    """Return a console on a stream; plain where that is no terminal, and without any style under ``NO_COLOR``."""
    system: Any = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(file=file, markup=False, highlight=False, emoji=False, legacy_windows=False, color_system=system)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = _PIPE_WIDTH
    return console


def say(console: Console, *parts: Part, label: Part = "") -> None:
    """Print a line; where the terminal is narrow it breaks between words, and goes on under its own beginning.

    Control characters are written out: a name in a file must not steer the terminal.
    """
    text, head = (
        Text.assemble(*((clean(part), "") if isinstance(part, str) else (clean(part[0]), part[1]) for part in line))
        for line in (parts, (label,))
    )
    if not head:
        console.print(text)
        return
    line = Table.grid(padding=0)
    line.add_column(no_wrap=True, width=head.cell_len)
    line.add_column(overflow="fold")
    line.add_row(head, text)
    console.print(line)


def print_table(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings. Where the terminal is narrow the last columns go; then the first one's texts break."""
    texts = [[clean(cell) for cell in row] for row in rows[:_MOST_ROWS]]
    widths = [max(map(cell_len, column)) for column in zip(titles, *texts, strict=True)]
    count = len(titles)
    while count > 1 and min(widths[0], _LEAST_NAME) + sum(widths[1:count]) + _GAP * (count - 1) > console.width:
        count -= 1
    widths = [max(1, min(widths[0], console.width - sum(widths[1:count]) - _GAP * (count - 1))), *widths[1:count]]
    is_right = [all(row[index][:1].isdigit() for row in texts) for index in range(count)]
    head, *body = ("\n".join(_lines(row, widths, is_right)) for row in [titles, *texts])
    line = "─" * (sum(widths) + _GAP * (count - 1))
    for text in (Text(head, "bold"), Text("\n".join([line, *body]))):  # rich's own table takes a second for 1000 rows
        console.print(text, no_wrap=True, overflow="ignore", crop=False)
    if count < len(titles):
        say(console, (f"(too narrow for: {', '.join(titles[count:])})", "dim"))
    if len(rows) > _MOST_ROWS:
        say(console, (f"… and {len(rows) - _MOST_ROWS:,} more; --json lists all", "dim"))


def _lines(row: Sequence[str], widths: Sequence[int], is_right: Sequence[bool]) -> Iterator[str]:
    """Yield the lines of one row; what is wider than its column goes on in the next line."""
    columns = [
        [part for line in cell.split("\n") for part in (chop_cells(line, width) if cell_len(line) > width else [line])]
        for cell, width in zip(row, widths, strict=False)
    ]
    for parts in itertools.zip_longest(*columns, fillvalue=""):
        blanks = [" " * (width - cell_len(part)) for part, width in zip(parts, widths, strict=True)]
        cells = [
            blank + part if right else part + blank for part, blank, right in zip(parts, blanks, is_right, strict=True)
        ]
        yield (" " * _GAP).join(cells).rstrip()


def say_first(console: Console, lines: Sequence[str], *, label: str, style: str = "yellow") -> None:
    """Print the first twenty lines under one label, and how many more there are."""
    for line in lines[:_MOST_LINES]:
        say(console, (line, style), label=(label, style))
    if len(lines) > _MOST_LINES:
        say(console, f"… and {len(lines) - _MOST_LINES:,} more; --json lists all", label=(label, style))


NO_LAYER = "no 4-bit layer; `q4 quantize IN OUT --format nf4` packs a dense checkpoint"
"""What ``inspect`` and ``explain`` say of a file whose tensors are all dense."""


def say_unread(console: Console, problems: Sequence[Mapping[str, Any]]) -> str | None:
    """Print what can't be read, by type, with what to do instead, and return how much it is; None where all is read.

    Each of the problems has ``type``, ``key`` and ``rule``.
    """
    if not problems:
        return None
    groups: dict[tuple[str, str], list[str]] = {}
    for item in problems:
        groups.setdefault((item["type"], item["rule"]), []).append(item["key"])
    by_size = sorted(groups.items(), key=lambda group: -len(group[1]))
    lines = [f"{kind}: {first_of(keys)} must be {rule}" for (kind, rule), keys in by_size]
    say_first(console, lines, label="can't be read: ")
    say(console, _INSTEAD, label="instead: ")
    counts = ", ".join(f"{kind} ({count:,})" for kind, count in unread_types(problems).items())
    return f"{len(problems):,} can't be read: {counts}"


def unread_types(problems: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many of the problems are of each type, the most first."""
    return dict(collections.Counter(item["type"] for item in problems).most_common())


def first_of(names: Sequence[str]) -> str:
    """Return ``a`` or ``a and 2 more``."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which ``layers.2`` comes before ``layers.10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def bytes_text(count: int) -> str:
    """Return a number of bytes for people, in binary units."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:  # noqa: PLR2004  # binary units
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def say_path(console: Console, path: Mapping[str, Any], *, label: str) -> None:
    """Print one path as a line: M, name, kind, precision, tier, whether interpreted."""
    low, high = path["m"]
    span = f"M {low}…{'∞' if high is None else high}"
    state = ", interpreted" if path["interpreted"] else ""
    facts = f"  {path['kind']}, {path['precision']}, tier {path['tier']}{state}"
    say(console, f"{span:<12} ", (path["name"], "cyan"), facts, label=label)


def clean(text: object) -> str:
    """Return text with control characters written out."""
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
    if attrs.has(type(value)):
        return {field.name: to_plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((to_plain(item) for item in value), key=str)
    if isinstance(value, Iterable) and not isinstance(value, bytes) and type(value).__module__ != "torch":
        return [to_plain(item) for item in value]
    return str(value).removeprefix("torch.")  # of a dtype


class Output:
    """Where one command writes: its answer to the real stdout, as text or as JSON, everything else to stderr."""

    def __init__(self, file: TextIO, *, as_json: bool) -> None:
        self.as_json = as_json
        self._file = file
        self._side = make_console(sys.stderr)

    def answer(self, record: Mapping[str, Any], show: Callable[[Console], None]) -> None:
        """Write the command's answer: ``record`` as JSON, or what ``show`` prints."""
        if self.as_json:
            # ASCII escapes are valid in every encoding of the pipe, and for every file name.
            self._file.write(json.dumps(to_plain(record), indent=2, allow_nan=False) + "\n")
            self._file.flush()
        else:
            show(make_console(self._file))

    def note(self, text: str) -> None:
        """Write a line for people to stderr."""
        say(self._side, (text, "dim"))

    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[..., None]]:
        """Show a progress bar on stderr where that is a terminal, with the time left.

        Call what it gives after each step, with a name, and how much of the total the step was; 1 if it is not given.
        """
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[item]}", markup=False, style="dim"))
        with Progress(*columns, console=self._side, transient=True, disable=not self._side.is_terminal) as bar:
            task = bar.add_task(label, total=total, item="")
            yield lambda item, share=1: bar.update(task, advance=share, item=clean(item))


@contextlib.contextmanager
def open_output(*, as_json: bool) -> Iterator[Output]:
    """Give a command its output; under ``--json`` all else that is printed to stdout goes to stderr meanwhile."""
    output = Output(sys.stdout, as_json=as_json)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield output


def warn(text: object) -> None:
    """Write a warning to stderr."""
    say(make_console(sys.stderr), str(text), label=("warning ", "yellow"))


@contextlib.contextmanager
def warnings_on_stderr(*hidden: type[Warning]) -> Iterator[None]:
    """Show warnings as one clean line on stderr instead of a line of source code, but for the hidden kinds."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if not issubclass(category, hidden):
            warn(message)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
