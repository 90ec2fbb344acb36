"""Chinese pages: their lines, which are no words."""

from __future__ import annotations

import re

__all__ = ["join_lines"]

_BETWEEN = re.compile("(?<=[\u3000-\u9fff\uff00-\uffef])\n(?=[\u4e00-\u9fff\\[]|`(?!``))")


def join_lines(text: str) -> str:
    """Return a page without the ends of lines within Chinese paragraphs, which a browser would show as spaces."""
    return _BETWEEN.sub("", text)
