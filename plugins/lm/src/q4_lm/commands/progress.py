"""Progress bars of the commands, with the time left, on stderr where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from q4_lm.models.load import loading_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["loading_shown", "progress"]


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar, and yield what moves it: a function of what is done and of all there is."""
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def loading_shown() -> Iterator[None]:
    """Show a bar while a model is loaded, block by block."""
    with progress("loading") as watch, loading_watched(watch):
        yield
