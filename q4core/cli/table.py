"""Tables that stay readable when the terminal is narrow: columns go first, then names lose part of their beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs
from rich.cells import cell_len
from rich.text import Text

from q4core.cli.output import clean, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["Column", "bytes_text", "counted", "elide", "print_table"]

_LEAST_NAME = 16
_GAP = 2
"""Cells between columns: one of padding and the divider."""


@attrs.frozen
class Column:
    """One column.

    Args:
        title: Its heading.
        justify: ``left`` or ``right``.
        drop: When the terminal is too narrow, columns go by rising ``drop``; 0 never goes.
        style: Rich style of its cells.
        elastic: Whether its texts may lose their middle.
    """

    title: str
    justify: Literal["left", "right"] = "left"
    drop: int = 0
    style: str = ""
    elastic: bool = False


def elide(text: str, width: int) -> str:
    """Return text of at most ``width`` cells; what goes is near the beginning, which most names of a model share."""
    if cell_len(text) <= width:
        return text
    head = (width - 1) // 6
    return f"{_head(text, head)}…{_head(text[::-1], width - 1 - head)[::-1]}"


def _head(text: str, width: int) -> str:
    """Return as much of a text's beginning as fits into ``width`` cells."""
    used = 0
    for index, character in enumerate(text):
        used += cell_len(character)
        if used > width:
            return text[:index]
    return text


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    return [
        max([cell_len(column.title), *(cell_len(row[index]) for row in rows)]) for index, column in enumerate(columns)
    ]


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, indent: int = 0
) -> None:
    """Print rows under headings; what does not fit is left out as a whole column, and said so."""
    texts = [[clean(cell.plain if isinstance(cell, Text) else cell) for cell in row] for row in rows]
    shown = list(range(len(columns)))
    widths = _widths(columns, texts)

    def needed() -> int:
        return indent + sum(widths[i] for i in shown) + _GAP * (len(shown) - 1)

    left_out: list[str] = []
    for index in sorted((i for i in shown if columns[i].drop), key=lambda i: columns[i].drop):
        if needed() <= console.width:
            break
        shown.remove(index)
        left_out.append(columns[index].title)
    fixed = sum(widths[i] for i in shown if not columns[i].elastic) + _GAP * (len(shown) - 1) + indent
    elastic = sum(1 for i in shown if columns[i].elastic)
    room = max(_LEAST_NAME, (console.width - fixed) // max(1, elastic))
    final = {i: min(widths[i], room) if columns[i].elastic else widths[i] for i in shown}
    sides = [(final[i], columns[i].justify == "right") for i in shown]
    start = " " * indent
    _put(console, _line([(columns[i].title, "bold") for i in shown], sides, start))
    _put(console, [(start + "─" * (sum(final.values()) + _GAP * (len(shown) - 1)), "")])
    for row, text in zip(rows, texts, strict=True):
        cells: list[tuple[str, Any]] = []
        for i in shown:
            cell = row[i]
            cells.append((elide(text[i], final[i]), cell.style if isinstance(cell, Text) else columns[i].style))
        _put(console, _line(cells, sides, start))
    if left_out:
        say(console, Text(f"(too narrow for: {', '.join(left_out)})", style="dim"), label=start)


def _line(cells: Sequence[tuple[str, Any]], sides: Sequence[tuple[int, bool]], start: str) -> list[tuple[str, Any]]:
    """Return texts with styles, filled up to their columns' widths."""
    parts: list[tuple[str, Any]] = [(start, "")]
    for index, ((text, style), (width, is_right)) in enumerate(zip(cells, sides, strict=True)):
        filler = " " * (width - cell_len(text))
        gap = " " * _GAP if index < len(cells) - 1 else ""
        parts += [(filler, ""), (text, style)] if is_right else [(text, style), (filler if gap else "", "")]
        parts.append((gap, ""))
    return parts


def _put(console: Console, parts: Sequence[tuple[str, Any]]) -> None:
    """Print one line that fits; there may be tens of thousands, for which rich's own table takes minutes."""
    if console.is_terminal:
        console.print(Text.assemble(*parts), no_wrap=True, overflow="ellipsis")
    else:
        console.file.write("".join(text for text, _ in parts) + "\n")


def counted(count: int, noun: str) -> str:
    """Return ``1 layer``, ``2 layers``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def bytes_text(count: int) -> str:
    """Return a number of bytes for people, in binary units."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:  # noqa: PLR2004  # binary units
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
