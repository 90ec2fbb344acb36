"""Tables in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["cell", "table"]


def cell(value: object) -> str:
    """Return a value as the text of one cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, is_raw: bool = False) -> str:
    """Return a table; ``is_raw`` rows hold Markdown that is escaped already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(item) if is_raw else cell(item) for item in line)} |" for line in lines)
