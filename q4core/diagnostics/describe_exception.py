"""Exceptions of plugins in words: kind, text, and where in their code they were raised."""

from __future__ import annotations

import functools
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from q4core.errors import PLUGIN_FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

_CORE = Path(__file__).parent.parent


def describe_exception(error: BaseException) -> str:
    """Return ``kind: text (in file:line, function)``; the text is a plugin's, and its ``str`` may raise."""
    kind, place = type(error).__name__, _first_place(reversed(list(traceback.walk_tb(error.__traceback__))))
    try:
        return f"{kind}: {error}{place}"
    except PLUGIN_FAULTS as other:
        return f"{kind}, whose text raises {type(other).__name__}{place}"


def _first_place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the place of the first frame that is not q4core's, torch's or the standard library's, or nothing.

    Only the parts of the file's path that its module has are shown: nothing of the names of this machine's folders.
    """
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not _is_passed_over(file):
            return f" (in {_short(frame, Path(file))}:{line}, {frame.f_code.co_name})"
    return ""


@functools.lru_cache(maxsize=1024)
def _is_passed_over(file: str) -> bool:
    path = Path(file)
    if any(path.is_relative_to(own) for own in (_CORE, Path(str(torch.__file__)).parent)):
        return True
    # Installed packages may lie below the standard library.
    is_installed = bool({"site-packages", "dist-packages"} & set(path.parts))
    return not is_installed and path.is_relative_to(sysconfig.get_path("stdlib"))


def _short(frame: FrameType, path: Path) -> str:
    module = str(frame.f_globals.get("__name__", "")).split(".")
    if path.stem == "__init__":
        module.append("__init__")
    count = len(module) if module[-1] == path.stem else 1
    return "/".join(path.parts[-count:])
