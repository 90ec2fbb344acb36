"""Help of the commands: plain lines that a pipe takes, broken at the terminal's width, and never cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    import typer

__all__ = ["Command", "Group"]

_INDENT = "    "
_LONG = 1 << 16


def _pieces(pieces: list[str]) -> list[str]:
    """Return what a usage line names: ``IN`` and ``[FILE]``, without the braces that newer typers add."""
    return [piece.strip("{}") for piece in pieces]


def _write_text(command: TyperCommand | TyperGroup, formatter: Any) -> None:
    """Write the paragraphs of a help text; an indented one is an example, and keeps its lines."""
    for paragraph in (command.help or "").partition("\f")[0].split("\n\n"):
        formatter.write_paragraph()
        if not paragraph.startswith(_INDENT):
            with formatter.indentation():
                formatter.write_text(paragraph)
            continue
        for line in paragraph.splitlines():
            formatter.write(f"{line}\n")


def _write_options(command: TyperCommand | TyperGroup, ctx: typer.Context, formatter: Any) -> None:
    """Write arguments and options, the former under the names that the usage line has."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for item in command.get_params(ctx):
        record = item.get_help_record(ctx)
        if record is None:
            continue
        is_argument = item.param_type_name == "argument"
        name = record[0].partition(" ")[0].strip("{}") if is_argument else record[0]
        sections["Arguments" if is_argument else "Options"].append((name, record[1]))
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


class Command(TyperCommand):
    """A command with such a help."""

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # typer's own copy of click
        """Return the words of the usage line."""
        return _pieces(super().collect_usage_pieces(ctx))

    def format_help_text(self, _: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # as above
        """Write what the command does."""
        _write_text(self, formatter)

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # as above
        """Write arguments and options."""
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    """A group of commands with such a help."""

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # as above
        """Return the words of the usage line."""
        return _pieces(super().collect_usage_pieces(ctx))

    def format_help_text(self, _: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # as above
        """Write what the group does."""
        _write_text(self, formatter)

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # as above
        """Write options, and what each command does, in a whole sentence."""
        _write_options(self, ctx, formatter)
        sentences = [
            (name, command.get_short_help_str(limit=_LONG))
            for name, command in ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(sentences)
