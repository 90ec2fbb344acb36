"""The Chinese pages follow the English ones, section by section."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.pages import ROOT, prose

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"
CHINESE = DOCS / "zh"
PAGES = sorted(page.relative_to(CHINESE).as_posix() for page in CHINESE.rglob("*.md"))
LONGEST = 60
"""Chinese characters of a sentence, or of a part that ends with a colon or semicolon."""
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"^(?P<fence>```).*?^(?P=fence)$|(?<=\n\n)(?: {4}[^\n]*\n|\n(?= {4}))+", re.DOTALL | re.MULTILINE)
_SWITCH = re.compile(r"^\[(English|中文)\]\(.*\)\n\n", re.MULTILINE)
_STOP = re.compile("[\u3002\uff01\uff1f\uff1b\uff1a]")
"""What ends a sentence or a part of one."""
_HEADING = re.compile(r"^(#+) ", re.MULTILINE)


def read(folder: Path, page: str) -> str:
    """Return a page without comments and the link to the other language."""
    return _SWITCH.sub("", _COMMENT.sub("", (folder / page).read_text(encoding="utf-8")))


def code(text: str) -> list[str]:
    """Return the blocks of code of a text."""
    return [found[0].strip("\n") for found in _CODE.finditer(text)]


def sections(text: str) -> list[tuple[str, str]]:
    """Return the level of each heading, as its signs, and what is under it, code included."""
    shown = _CODE.sub(lambda found: re.sub(r"^#", " #", found[0], flags=re.MULTILINE), text)
    parts = _HEADING.split(shown)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def words(text: str) -> set[tuple[str, str]]:
    """Return the code within lines and the ids of cases, which are the same in every language."""
    return set(re.findall(r"`([^`\n]+)`|\b((?:TC|EX|UC)-\d+)\b", prose(text)))


def shape(text: str) -> tuple[int, int, list[int]]:
    """Return the numbers of list items, of numbered ones, and of cells in each row of a table."""
    plain = prose(text)
    rows = [len(line.split("|")) for line in plain.splitlines() if line.startswith("|")]
    return len(re.findall(r"^- ", plain, re.MULTILINE)), len(re.findall(r"^\d+\. ", plain, re.MULTILINE)), rows


def links(folder: Path, page: str) -> list[str]:
    """Return the targets of a page's links, by their place in the folder."""
    found = re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", read(folder, page)))
    places = [os.path.relpath((folder / page).parent / target, DOCS) for target in found if "://" not in target]
    return sorted(place.removeprefix("zh/") for place in places)


def differences(english: str, chinese: str) -> list[str]:
    """Return what differs in headings and code, section by section."""
    ours, theirs = sections(chinese), sections(english)
    if [level for level, _ in ours] != [level for level, _ in theirs]:
        return ["headings"]
    return [
        f"{what} under heading {number}: {sorted(map(str, read_part(left)))} and {sorted(map(str, read_part(right)))}"
        for number, ((_, left), (_, right)) in enumerate(zip(theirs, ours, strict=True), 1)
        for what, read_part in (("code", code), ("names", words), ("lists and tables", shape))
        if read_part(left) != read_part(right)
    ]


def test_the_pages_are_there() -> None:
    """The first page, installation, the five tutorials, use cases and architecture are in Chinese."""
    tutorials = {f"tutorials/{path.name}" for path in (DOCS / "tutorials").glob("*.md")}
    assert len(tutorials) == 4  # the fifth is how to write a backend
    assert {*PAGES} == {"index.md", "install.md", "use-cases.md", "architecture.md"} | tutorials | {
        "write-a-backend/index.md"
    }


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_same_headings_and_code(page: str) -> None:
    """Headings have the same levels; under each one are the same programs, names, items and rows."""
    assert differences(read(DOCS, page), read(CHINESE, page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_lead_to_the_same_pages(page: str) -> None:
    """Links have the same targets, in Chinese where these pages are."""
    assert links(CHINESE, page) == links(DOCS, page)
    text = (CHINESE / page).read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"(?<!English)\]\(([^)\s]+\.md[^)\s]*)\)", text)]
    outside = [os.path.relpath((CHINESE / page).parent / target, DOCS) for target in targets]
    assert [place for place in outside if not place.startswith("zh/") and (CHINESE / place).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_it_is_chinese_in_short_sentences(page: str) -> None:
    """Every paragraph has Chinese characters, and no sentence is long."""
    plain = re.sub(r"`[^`\n]*`", "", prose(read(CHINESE, page)))
    blocks = [block for block in re.split(r"\n\s*\n", plain) if re.search(r"[a-z]{4}", block) and "|" not in block]
    assert [block for block in blocks if not re.search("[\u4e00-\u9fff]", block) and not block.startswith("# ")] == []
    items = re.split(r"\n\s*\n|^\s*(?:-|\d+\.)\s|^#+ ", plain, flags=re.MULTILINE)
    found = [part for item in items if "|" not in item for part in re.split(_STOP, item)]
    assert [part for part in found if len(re.findall("[\u4e00-\u9fff]", part)) > LONGEST] == []


@pytest.mark.parametrize(
    ("english", "chinese", "what"),
    [
        ("# A\n\n## B\n", "# 甲\n", "headings"),
        ("# A\n\n## B\n", "# 甲\n\n### 乙\n", "headings"),
        ("# A\n\n```python\nx = 1\n```\n", "# 甲\n\n```python\nx = 2\n```\n", "code under heading 1"),
        ("# A\n\n    q4 doctor\n\n", "# 甲\n\n    q4 inspect\n\n", "code under heading 1"),
        ("# A\n\n## B\n\nCall `f`.\n", "# 甲\n\n## 乙\n\n调用 `g`。\n", "names under heading 2"),
        ("# A\n\n- one\n- two\n", "# 甲\n\n- 一\n", "lists and tables under heading 1"),
    ],
)
def test_what_differs_is_named(english: str, chinese: str, what: str) -> None:
    """A heading, a program, a name and an item that one language lacks are found."""
    (found,) = differences(english, chinese)
    assert found.startswith(what)


def test_a_comment_in_code_is_no_heading() -> None:
    """A line of code that begins with a sign of a heading is code."""
    assert differences("# A\n\n```sh\n# code\n```\n", "# 甲\n\n```sh\n# code\n```\n") == []
