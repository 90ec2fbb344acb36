"""The plugins' commands: each announced by an entry point, and imported when it is asked for or listed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING

import typer

from q4_cli.help import Command, Group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["GROUP", "Announced", "announced", "load"]

GROUP = "q4core.commands"
"""Entry points here have a command's name, and name a function as typer takes it, or a ``typer.Typer`` of several."""

Announced = dict[str, importlib.metadata.EntryPoint]


def announced(taken: Iterable[str]) -> tuple[Announced, list[str]]:
    """Return the commands of the plugins that are not shut out, by name, and what is wrong with others.

    ``taken`` are names that no plugin may have. A name that two distributions announce is left out.
    """
    given: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        same = given.setdefault(point.name, [])
        if point.value not in {other.value for other in same}:  # a distribution may be on the path twice
            same.append(point)
    found, problems = {}, []
    for name, points in sorted(given.items()):
        if name in taken:
            problems.append(f"a plugin's command {name!r} is left out: the name is taken")
        elif len(points) > 1:
            owners = " and ".join(sorted(_owner(point) for point in points))
            problems.append(f"the command {name!r} is left out: {owners} both announce it")
        elif _is_let_in(points[0]):
            found[name] = points[0]
    return found, problems


def _owner(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


def _is_let_in(point: importlib.metadata.EntryPoint) -> bool:
    """Return whether the variables let in a plugin of the command's distribution, or it has none."""
    if not (os.environ.get("Q4_PLUGINS") or os.environ.get("Q4_DISABLE_PLUGINS")) or point.dist is None:
        return True
    from q4core.plugin_api import names_of_plugins  # noqa: PLC0415  # loads torch; the variables are rarely set

    own = [item.name for item in point.dist.entry_points if item.group == "q4core.plugins"]
    return not own or bool({*own} & {*names_of_plugins(os.environ)})


def load(name: str, point: importlib.metadata.EntryPoint, prepared: Callable[..., Callable[..., None]]) -> typer.Typer:
    """Import a command and return an application of it alone.

    ``prepared`` wraps the functions. Whatever the plugin raises comes through.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints while it is loaded is no part of the output
        given = point.load()
    app = typer.Typer()
    if isinstance(given, typer.Typer):
        for part in _parts(given):
            for info in part.registered_commands:
                info.cls = Command
                info.callback = info.callback and prepared(info.callback)
        app.add_typer(given, name=name, cls=Group)
    else:
        app.command(name, cls=Command)(prepared(given))
    app.callback()(lambda: None)
    typer.main.get_command(app)  # which raises what typer can't build
    return app


def _parts(app: typer.Typer) -> Iterator[typer.Typer]:
    yield app
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _parts(group.typer_instance)
