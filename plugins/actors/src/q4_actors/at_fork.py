"""Whom a fork concerns: in the child, everything that threads of its parent hold is the parent's."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from q4_actors.content import Content

__all__ = ["let_forks_know"]

_CONTENTS: weakref.WeakSet[Content] = weakref.WeakSet()


def let_forks_know(content: Content) -> None:
    """Call ``content.after_fork`` in each child that this process forks from now on."""
    _CONTENTS.add(content)


def _after_fork() -> None:
    for content in tuple(_CONTENTS):
        content.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
