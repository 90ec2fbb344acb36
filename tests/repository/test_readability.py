"""Every page is in short sentences."""

from __future__ import annotations

import pytest

from tests.support.pages import PAGES, ROOT, sentences

MOST_WORDS = 17
LONGEST = 45


def test_sentences_are_those_of_prose() -> None:
    """Paragraphs and items are cut into sentences; code, tables, headings, comments and pictures have none."""
    page = (
        "# A heading with words\n\nOne sentence. Another\none, by [a link](to/a.page)!\n\n- An item\n- and one more\n\n"
        "    indented code of words\n\n```python\n# A comment in code.\n```\n\n| a table | of words |\n\n"
        "![A picture of words](a.png)\n<!-- A comment\nof words. -->\n"
    )
    assert sentences(page) == ["One sentence.", "Another\none, by a link!", "An item", "and one more"]


@pytest.mark.parametrize("page", PAGES)
def test_mean_sentence_is_short(page: str) -> None:
    """On average a sentence has at most 17 words, and none has more than 45."""
    found = sentences((ROOT / page).read_text(encoding="utf-8"))
    assert found
    assert sum(len(sentence.split()) for sentence in found) / len(found) <= MOST_WORDS
    assert [sentence for sentence in found if len(sentence.split()) > LONGEST] == []
