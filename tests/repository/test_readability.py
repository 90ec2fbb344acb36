"""Pages that a newcomer reads first are in short sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/index.md",
    "docs/architecture.md",
    "docs/support.md",
    "docs/precision.md",
    "docs/memory.md",
    *(f"docs/write-a-backend/{name}.md" for name in ("index", "kernel", "certify", "publish", "dialect", "memory")),
]
MOST_WORDS = 18


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose, without code, tables, headings and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    kept = [line for line in text.splitlines() if not re.match(r"\s*(\||#|!\[| {4}\S)", line)]
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(kept))
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+", prose)
    return [part for block in blocks for part in re.split(r"(?<=[.!?])\s+", block.strip()) if len(part.split()) > 1]


@pytest.mark.parametrize("page", PAGES)
def test_mean_sentence_is_short(page: str) -> None:
    """On average a sentence has at most twenty words."""
    found = sentences((ROOT / page).read_text(encoding="utf-8"))
    assert found
    assert sum(len(sentence.split()) for sentence in found) / len(found) <= MOST_WORDS
