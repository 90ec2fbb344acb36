"""Output of ``q4 conform`` on a run."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from q4_conformance.outcome import BAD_VALUES, Outcome, grouped
from q4_conformance.report.status import counted, line_of, title_of
from q4_conformance.report.tally import NAMES, SIGNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from q4_conformance.execution.query import Run

_PIPE_WIDTH = 1 << 14
_MOST_SHOWN = 20
"""Messages of failures; each may be of many cases."""
STYLES = {"certified": "bold green", "interpreted": "bold yellow", "partial": "bold yellow", "failed": "bold red"}
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
"""Where an object lies, which its text may say, differs between the processes of a run."""


def console_of(*, to_stderr: bool = False) -> Console:
    """Return what prints to stdout, or to stderr."""
    stream = sys.stderr if to_stderr else sys.stdout
    # Where the output is no terminal nothing is cut, so that grep finds whole ids.
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, markup=False, highlight=False, emoji=False, width=width, soft_wrap=False)


def _lines(text: str) -> list[str]:
    """Return the lines of a text that say something, without what a terminal can't show."""
    lines = [line.expandtabs(1) for line in text.splitlines() if line.strip()]
    return ["".join(letter if letter.isprintable() else "?" for letter in line) for line in lines]


def _show_failures(console: Console, bad: Sequence[Mapping[str, Any]]) -> None:
    """Show each message once, with the first case that has it: one cause may fail every case."""
    groups = [*grouped(bad, lambda item: (item["outcome"], _ADDRESS.sub("0x", item["message"]))).values()]
    for members in groups[:_MOST_SHOWN]:
        first, others = members[0], len(members) - 1
        head = Text(f"{SIGNS[first['outcome']]} {NAMES[first['outcome']]} ", style="red")
        line = Text.assemble(head, first["case"])
        if others:
            cases = "1 other case" if others == 1 else f"{others:,} other cases"
            line.append(f" and {cases}, all with this message:")
        console.print(line)
        for text in (*_lines(first["message"]), *_lines(first.get("reproducer", ""))):
            console.print(Text(f"    {text}", style="dim"))
    left = sum(map(len, groups[_MOST_SHOWN:]))
    if left:
        console.print(f"… and {left:,} more; --report and --json have all")


def show_run(document: Mapping[str, Any], run: Run, files: Sequence[Path]) -> None:
    """Show on stdout how a run ended: what failed, the counts, the seal, and what was written."""
    console = console_of()
    _show_failures(console, [item for item in document["results"] if item["outcome"] in BAD_VALUES])
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ["cases", "pass", "passed_by_fallback", *(item.value for item in Outcome if item is not Outcome.PASS)]
    table.add_column("format")
    for name in names:
        table.add_column(NAMES[name].replace(" ", "\n"), justify="right")
    for row in document["formats"]:
        table.add_row(row["format"], *(str(row[name] or "") for name in names))
    for row in document["not_declared"]:
        console.print(f"not declared: {row['what']}, {row['cases']:,} cases")
    counts = document["counts"]
    if len(document["formats"]) > 1:
        table.add_row("all", *(str(counts[name] or "") for name in names), style="bold")
    console.print(table)
    seal, meaning = line_of(document)
    console.print()
    console.print(Text.assemble((seal, STYLES[document["standing"]]), meaning))
    if document["missing"]:
        console.print(Text(f"{len(document['missing'])} cases have no result", style="red"))
    console.print(Text(counted(document), style="dim"))
    console.print(Text(f"{title_of(document)} on {document['subject']['device']}, in {run.seconds:.0f} s", style="dim"))
    for path in files:
        console.print(Text(f"wrote {path}", style="dim"))


def show_check(page: Path, fresh: Path | None, *, is_same: bool) -> None:
    """Show on stdout whether a run ended as a committed page says, and how to see the difference."""
    console = console_of()
    if is_same:
        console.print(Text(f"✓ every case ended as in {page}", style="bold green"))
        return
    console.print(Text(f"✗ cases ended otherwise than in {page}", style="bold red"))
    other = fresh if fresh is not None else "DIR/certificate.md, which --report DIR writes"
    console.print(f"to see the difference: diff {page} {other}")
