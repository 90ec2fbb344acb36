"""Words of the field in pages, and in docstrings, comments, messages and names of the sources."""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from typing import TYPE_CHECKING

import pytest

from tests.support.pages import PAGES, ROOT, prose

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("q4core", "plugins/*/src", "conformance/**/src", "tools", "benchmarks")
    for folder in ROOT.glob(pattern)
    for path in folder.rglob("*.py")
)
CHANGES = ["CHANGELOG.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("changelog.d/+*.md"))]
AVOIDED = {
    r"t(?:old|ell|ells|elling)\b(?! apart)": "report, state, describe, pass; 'Defaults to …' for 'unless told'",
    r"let\w* (?:\S+ )?take up|t(?:ake|akes|aken|aking|ook) up": "reuse, import",
    r"put(?:s|ting)? out": "release, evict, end",
    r"good-?byes?": "exit",
    r"wish(?:es|ed)?": "options, request",
    r"stands\b(?! for)": "is, lies, holds",
    r"beside": "next to, compared with, besides",
    r"as ever": "as usual",
    r"done with": "dropped, finished, processed",
    r"kept(?! out)": "stored, held, left, retained",
}
PATTERNS = {
    re.compile(rf"\b(?:{words})\b".replace(" ", r"\s+"), re.IGNORECASE): better for words, better in AVOIDED.items()
}
EXCEPTIONS = {
    # The term of actors' libraries for a message that awaits no answer.
    "plugins/actors/src/q4_actors/runtimes/": ("tell",),
    "plugins/snn/src/q4_snn/actors.py": ("tell",),
}
"""How paths of sources begin → words of the list that are right there."""
PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def avoided(parts: Iterable[tuple[int, str]], *, terms: Container[str] = ()) -> list[str]:
    """Return line, word and what is better, for each word of the list, but terms, in parts with their first lines."""
    return [
        f"{line + text.count(chr(10), 0, match.start())}: {match.group()!r}; better: {better}"
        for line, text in parts
        for pattern, better in PATTERNS.items()
        for match in pattern.finditer(text)
        if match.group().lower() not in terms
    ]


def parts_of_source(source: str) -> Iterator[tuple[int, str]]:
    """Yield strings, comments and names of a source, the words of a name apart."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in PROSE:
            yield token.start[0], token.string
        elif token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            yield token.start[0], re.sub(r"(?<=[a-z])(?=[A-Z])", " ", token.string).replace("_", " ")


def parts_of_page(page: str) -> Iterator[tuple[int, str]]:
    """Yield the prose of a page without code in its lines: names are those of sources."""
    yield 1, re.sub(r"`[^`\n]+`", "``", prose(page))


@pytest.mark.parametrize("path", SOURCES)
def test_sources_use_the_words_of_the_field(path: str) -> None:
    """No docstring, comment, message or name of a source has a word of the list."""
    terms = [word for start, words in EXCEPTIONS.items() if path.startswith(start) for word in words]
    assert avoided(parts_of_source((ROOT / path).read_text(encoding="utf-8")), terms=terms) == []


@pytest.mark.parametrize(("start", "word"), [(start, word) for start, words in EXCEPTIONS.items() for word in words])
def test_every_exception_is_needed(start: str, word: str) -> None:
    """A word that is no longer in the sources of an exception is none of it."""
    sources = [(ROOT / path).read_text(encoding="utf-8") for path in SOURCES if path.startswith(start)]
    assert any(f": '{word}';" in item for source in sources for item in avoided(parts_of_source(source)))


@pytest.mark.parametrize("path", [*PAGES, *CHANGES])
def test_pages_use_the_words_of_the_field(path: str) -> None:
    """No page and no note of a change has a word of the list."""
    assert avoided(parts_of_page((ROOT / path).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "line", "word"),
    [
        ('\n"""Return what\nit told."""', 3, "told"),
        ("def tell_selection(): ...", 1, "tell"),
        ("# kept with the weight\n", 1, "kept"),
        ('f"{name} can\'t be taken up here"', 1, "taken up"),
        ("class LiveWishes: ...", 1, "Wishes"),
    ],
)
def test_words_of_the_list_are_found_in_sources(source: str, line: int, word: str) -> None:
    """Docstrings, names, comments, messages and classes are searched."""
    (found,) = avoided(parts_of_source(source))
    assert found.startswith(f"{line}: '{word}'; better: ")


@pytest.mark.parametrize(
    ("page", "line", "word"),
    [
        ("# What stands here\n", 1, "stands"),
        ("```\ncode\n```\n\n    code\n\nOne line,\nBeside another.\n", 8, "Beside"),
        ("It takes\nup two lines.\n", 1, "takes\\nup"),
        ("| wish | [as it is](a.md) |\n", 1, "wish"),
    ],
)
def test_words_of_the_list_are_found_in_pages(page: str, line: int, word: str) -> None:
    """Headings, paragraphs, words that a line break parts and tables are searched, behind code as well."""
    (found,) = avoided(parts_of_page(page))
    assert found.startswith(f"{line}: '{word}'; better: ")


def test_a_term_is_the_only_exception() -> None:
    """Where a term is allowed, other words of the list are found, and other forms of the term."""
    parts = [*parts_of_source("def tell(): ...  # told, and kept\n")]
    assert [item.split("'")[1] for item in avoided(parts)] == ["tell", "told", "kept"]
    assert [item.split("'")[1] for item in avoided(parts, terms=("tell",))] == ["told", "kept"]


def test_other_words_are_not_found() -> None:
    """A stand-in, an antelope, what 'stands for' something and who is kept out are no words of the list."""
    source = '"""A stand-in stands for an antelope, kept out; telltale, besides."""\nstandard = keptx = 1\n'
    assert avoided(parts_of_source(source)) == []


def test_code_of_a_page_is_not_searched() -> None:
    """Code in blocks and in lines, comments and targets of links are left to the tests of what they show."""
    page = "```python\nkept = 1\n```\n\n    told\n\nAn `ask` or a `tell`, [a link](kept.md).\n<!-- beside -->\n"
    assert avoided(parts_of_page(page)) == []
