"""The repository's pages, and their prose."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["PAGES", "ROOT", "prose", "sentences"]

ROOT = Path(__file__).parents[2]
_PATTERNS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/*/*.md",
    "q4core/README.md",
    "plugins/*/README.md",
    "conformance/**/README.md",
    "examples/**/*.md",
    "tests/**/*.md",
    "changelog.d/README.md",
)
_RECORDS = ROOT / "docs" / "decisions"
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in _PATTERNS
    for page in ROOT.glob(pattern)
    if _RECORDS not in page.parents
)
"""Every page but decisions, which are records, and the certificates of plugins, which are generated."""
_LEFT_OUT = re.compile(
    r"<!--.*?-->"  # comments
    r"|^(?P<fence>```|~~~).*?^(?P=fence)[ \t]*$"  # code between fences
    r"|(?<=\n\n)(?: {4}[^\n]*\n|\n(?= {4}))+",  # indented code after an empty line
    re.DOTALL | re.MULTILINE,
)


def prose(text: str) -> str:
    """Return a page without code blocks, comments and targets of links; every line has the number that it had."""
    text = _LEFT_OUT.sub(lambda found: "\n" * found[0].count("\n"), text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose, without tables, headings and pictures."""
    lines = [line for line in prose(text).splitlines() if not re.match(r"\s*(\||#|!)", line)]
    blocks = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s+", "\n".join(lines), flags=re.MULTILINE)
    return [part for block in blocks for part in re.split(r"(?<=[.!?])\s+", block.strip()) if len(part.split()) > 1]
