"""The plugin of the kit: the command ``q4 conform``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def q4_commands(app: typer.Typer) -> None:
    """Add ``conform`` to the ``q4`` command."""
    from q4_conformance.command.conform import add_conform  # noqa: PLC0415  # typer and rich are the command's alone

    add_conform(app)
