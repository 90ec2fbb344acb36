"""The ``q4`` command (extra ``q4core[cli]``). Nothing else in the core imports it; it imports nothing until it runs."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_MISSING = """\
q4: the command line needs {names}, which {verb} not installed.
    python3 -m pip install 'q4core[cli]'
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``q4`` command and return its exit status.

    Args:
        arguments: The words after ``q4``; those of the process unless told.

    Returns:
        0 when all went well, 1 when nothing here can serve, 2 for bad input or usage, 70 for a fault of the program,
        130 after Ctrl-C, 141 when the reader of the output went away.
    """
    if arguments is None:
        gc.freeze()  # what torch is made of ends with the process: a look through it for garbage takes long
    missing = [name for name in ("typer", "rich") if not _has(name)]
    if missing:
        sys.stderr.write(_MISSING.format(names=" and ".join(missing), verb="is" if len(missing) == 1 else "are"))
        return 2
    from q4core.cli.app import run  # noqa: PLC0415  # typer and rich are imported only when the command runs

    return run(sys.argv[1:] if arguments is None else list(arguments))


def _has(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
