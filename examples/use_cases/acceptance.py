"""What a use case must show: each statement of docs/use-cases.md, whether it holds here, and what was seen.

Each program's docstring names its extras of q4core. Where a package or plugin of them is not here, the program ends
with status 2 and says how to get it: this module, which programs import before any plugin, looks for the packages.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ROOM", "Acceptance", "held_bytes"]

_EXTRAS = re.compile(r'"q4core\[([\w,]+)\]"')
_BROUGHT = re.compile(r"""([\w-]+).*; extra == ['"](\w+)['"]""")

_STATUS = Path("/proc/self/status")
ROOM = 2**20
"""Bytes that an allocator may hold for later use. What a leak would hold is many times as much."""


def held_bytes() -> int | None:
    """Return the bytes that this process holds and that no file backs, freed ones given back; None but on Linux."""
    if not _STATUS.is_file():
        return None
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _packages(extras: str) -> list[str]:
    """Return the packages that extras of q4core bring."""
    found = filter(None, map(_BROUGHT.match, importlib.metadata.requires("q4core") or []))
    return sorted({match[1] for match in found if match[2] in extras.split(",")})


def _absent(extras: str) -> list[str]:
    """Return a sentence for each package of extras that is not installed."""
    here = {(item.name or "").lower() for item in importlib.metadata.distributions()}
    return [f"the package {name} is not installed" for name in _packages(extras) if name not in here]


def _off(extras: str) -> list[str]:
    """Return a sentence for each plugin of extras that is installed and not loaded."""
    from q4core import default_registry  # noqa: PLC0415  # once its own package is known to be here

    names, points = _packages(extras), importlib.metadata.entry_points(group="q4core.plugins")
    brought = {point.name for point in points if point.dist is not None and point.dist.name in names}
    return [
        f"the plugin {item.name!r} is {item.state}{''.join(f': {error}' for error in item.errors)}"
        for item in default_registry().records()
        if item.name in brought and item.state != "loaded"
    ]


def _require(problems_of: Callable[[str], list[str]]) -> None:
    """End the program where something is wrong with each set of extras that its docstring offers."""
    asked = _EXTRAS.findall(sys.modules["__main__"].__doc__ or "")
    found = {extras: problems_of(extras) for extras in asked}
    if not found or not all(found.values()):
        return
    extras, problems = next(iter(found.items()))
    print(f"error: {'; '.join(problems)}", file=sys.stderr)
    print(f'hint: python -m pip install "q4core[{extras}]", and see what `q4 doctor` says', file=sys.stderr)
    raise SystemExit(2)


_require(_absent)


class Acceptance:
    """Statements as they are judged, on the screen; the program ends where a plugin that it runs on is not loaded.

    Args:
        title: Id and name of the use case.
    """

    def __init__(self, title: str) -> None:
        _require(_off)
        self._signs: list[str] = []
        print(title)

    def judge(self, statement: str, *seen: object, holds: bool) -> None:
        """Print a statement, whether it holds, and what was seen."""
        self._show("✓" if holds else "✗", statement, *seen)

    def leave(self, statement: str, why: object) -> None:
        """Print a statement that can't be judged on this machine, and why."""
        self._show("○", statement, f"not testable here: {why}")

    def _show(self, sign: str, statement: str, *seen: object) -> None:
        self._signs.append(sign)
        print(f"\n{sign} {statement}")
        for item in seen:
            print("    " + str(item).replace("\n", "\n    "))

    def end(self) -> int:
        """Print how many statements held, and return the exit status: 0 where none failed."""
        held, failed, left = (self._signs.count(sign) for sign in "✓✗○")
        print(f"\n{held} hold, {failed} fail, {left} not testable here")
        return int(failed > 0)
