"""Contents that a forked child must hear of: everything that threads of its parent hold is the parent's."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from q4_actors.tensors.protocol import Content

__all__ = ["CONTENTS"]

CONTENTS: weakref.WeakSet[Content] = weakref.WeakSet()
"""``after_fork`` of each is called in every child that this process forks."""


def _after_fork() -> None:
    for content in tuple(CONTENTS):
        content.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
