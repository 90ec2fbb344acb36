"""Pages that are made from data, the picture of the first page, and the checks that a build of the site makes."""

from __future__ import annotations

import json
import re
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.verdict import Verdict
from tests.repository.test_readme import SHOWN, instruction_sets
from tests.support.pages import ROOT
from tools.projects import Project
from tools.website import chinese, compatibility, inventories, performance, picture

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"
INDEX = (DOCS / "index.md").read_text(encoding="utf-8")
PLACES = {
    "compatibility.md": "(certificates/README.md)",
    "contributing.md": "`CONTRIBUTING.md`",
    "packages.md": "`q4core/README.md`",
    "performance.md": "`benchmarks/results`",
}
"""Page of which a part is made with the site → the place that it names."""


def test_every_verdict_is_on_the_page() -> None:
    """Each stored verdict has a row, those that are missed too; each result has its date, commit and machine."""
    page = performance.page()
    for name, result in performance.read().items():
        section = page.partition(f"\n## {performance.TITLES[name][0]}\n")[2].partition("\n## ")[0]
        rows = [line for line in section.splitlines() if re.match(r"\| (met|MISSED|not measured) \|", line)]
        stored = result.get("verdicts", [])
        assert len(rows) == len(performance.verdicts(name, result))
        assert sum(row.startswith("| MISSED") for row in rows) >= sum(one["verdict"] == "MISSED" for one in stored)
        facts = result.get("environment", {"date": "not recorded", "commit": "not recorded"})
        assert facts["date"][:10] in section or facts["date"] in section
        assert facts["commit"] in section


def _results(folder: Path, **changes: dict[str, Any]) -> Path:
    for name in performance.TITLES:
        (folder / f"{name}.json").write_text(json.dumps({}), encoding="utf-8")
    for name, result in changes.items():
        (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def test_a_title_without_a_stored_result_is_named(tmp_path: Path) -> None:
    """The page can't be made where a result of its table is gone."""
    (_results(tmp_path) / "snn.json").unlink()
    with pytest.raises(performance.ResultsError, match="without a stored result in benchmarks/results: snn"):
        performance.read(tmp_path)


def test_a_result_without_a_title_is_named(tmp_path: Path) -> None:
    """A new result can't be left out of the page."""
    with pytest.raises(performance.ResultsError, match=r"without a title in .*: fresh"):
        performance.read(_results(tmp_path, fresh={}))


def test_a_verdict_that_contradicts_its_ratio_is_named() -> None:
    """What is stored as met must be met."""
    stored = Verdict("faster", "a layer", 0.5, 1.0).to_json() | {"verdict": "met"}
    with pytest.raises(performance.ResultsError, match="a layer is stored as 'met', and is 'MISSED'"):
        performance.verdicts("snn", {"verdicts": [stored]})


def test_compatibility_has_the_outcome_of_each_case() -> None:
    """The signs of each certificate's table, added up by contract case, are those of the page."""
    found = {one.name: one for one in compatibility.read()}
    assert found.keys() == {folder.name for folder in compatibility.CERTIFICATES.iterdir() if folder.is_dir()}
    text = (compatibility.CERTIFICATES / "cpu-native" / "certificate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| TC-09/\w+ \| [^|]* \| ✓ (\d+)", text, re.MULTILINE)
    assert found["cpu-native"].outcomes["nf4"]["TC-09"] == f"✓ {sum(map(int, rows))}"
    assert found["um-managed"].outcomes["any"]["TC-07"] == "○ 1 ✓ 1"
    page = compatibility.page()
    assert all(f"{one.name} on " in page or f"[{one.name}]({one.page})" in page for one in found.values())


def test_a_gpu_shows_what_did_not_run() -> None:
    """Cases of a stored run that did not run are counted on the page."""
    (result,) = [json.loads(path.read_text(encoding="utf-8")) for path in performance.RESULTS.glob("gpu-*.json")]
    reports = result["stages"]["cases"]["reports"]
    found = {one.name: one for one in compatibility.read_gpu()}
    for name, own in reports.items():
        backend, _, kind = name.partition(", ")
        left = f"○ {own['not_run']}" if own["not_run"] else None
        assert found[backend].outcomes[kind].get("not run") == left
        passed = [re.search(r"✓ (\d+)", text) for text in found[backend].outcomes[kind].values()]
        assert sum(int(one[1]) for one in passed if one) == own["counts"]["pass"]


@pytest.mark.parametrize(("page", "place"), [*PLACES.items()])
def test_a_made_page_says_where_its_text_is(page: str, place: str) -> None:
    """Who reads the file, where nothing is made, sees where the text comes from or is."""
    text = (DOCS / page).read_text(encoding="utf-8")
    assert place in text.partition("<!-- made: ")[0]
    assert {path.name for path in DOCS.glob("*.md") if "<!-- made: " in path.read_text("utf-8")} == {*PLACES}


def test_the_extras_are_listed_as_in_the_core_s_own_page() -> None:
    """The table has each extra and its sentence, in their order."""
    own = (ROOT / "q4core" / "README.md").read_text(encoding="utf-8").partition("\n## Extras\n")[2]
    sentences = re.findall(r"^### (\w+)\n\n(.*?)\n\n", own, re.MULTILINE | re.DOTALL)
    page = (DOCS / "packages.md").read_text(encoding="utf-8").partition("\n## Extras\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(name, " ".join(text.split())) for name, text in sentences]
    assert {name for name, _ in rows} == set(Project(ROOT).requirements) - {"", "all"}


def test_a_page_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    """A folder without a page, and a page of another form, are errors with their names."""
    (tmp_path / "ours").mkdir()
    with pytest.raises(compatibility.CertificateError, match="no page in ours"):
        compatibility.read(tmp_path)
    (tmp_path / "ours" / "certificate.md").write_text("# ours of q4-ours 1.0 on cpu: ✓ Certified\n", encoding="utf-8")
    with pytest.raises(compatibility.CertificateError, match=r"certificate\.md: is not a page"):
        compatibility.read(tmp_path)


def test_the_picture_shows_what_the_command_prints(tmp_path: Path) -> None:
    """The picture of the first page is what ``q4 explain`` prints here, but for the name of the instruction set."""
    rows = instruction_sets()[SHOWN][1]
    shown = picture.shown(picture.STORED.read_text(encoding="utf-8"))
    assert f"M 1…{rows - 1}" in " ".join(shown)
    printed = picture.shown(picture.draw(picture.run(tmp_path)))

    def plain(lines: list[str]) -> list[str]:
        text = "\n".join(lines)
        for name, (_, few) in instruction_sets().items():
            text = text.replace(name.replace("-", "_"), "ISA").replace(name, "ISA").replace(f"1…{few - 1}", "1…F")
            text = text.replace(f"M {few}…∞", "M F…∞")
        return [re.sub(r" +", " ", line) for line in text.splitlines()]

    assert plain(printed) == plain(shown)


def test_every_page_has_a_place() -> None:
    """Each page is in one table of contents."""
    places = []
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in tree.splitlines():
                if line and not line.startswith(":"):
                    places += [path.resolve() for path in page.parent.glob(f"{line}.md")]
    pages = {page.resolve() for page in DOCS.rglob("*.md")} - {DOCS / "index.md", DOCS / "decisions" / "template.md"}
    assert set(places) - {DOCS / "decisions" / "template.md"} == pages
    assert len([place for place in places if place.parent == DOCS]) == len({p for p in places if p.parent == DOCS})


def test_navigation_is_by_reader() -> None:
    """The first page has the sections of the site, in this order."""
    captions = re.findall(r"^:caption: (.*)$", INDEX, re.MULTILINE)
    assert captions == [
        "Start",
        "Tutorials",
        "How-to for users",
        "How-to for authors of plugins",
        "Reference",
        "Explanation",
        "For contributors",
        "中文",
    ]


def test_chinese_lines_are_joined() -> None:
    """Within a paragraph the end of a line is no space; blocks, items, rows and English lines stay."""
    assert chinese.join_lines("一行。\n二行\n`名称`。\n\n三\n") == "一行。二行`名称`。\n\n三\n"
    others = "甲。\n\n乙\n- 丙\n| 丁 |\n```text\nx\n```\none\ntwo 戊\nthree\n"
    assert chinese.join_lines(others) == others


def test_an_inventory_has_its_names(tmp_path: Path) -> None:
    """Each stored inventory has the four lines and the packed ones of Sphinx's format: a name, and where it lies."""
    for project in inventories.PROJECTS:
        *head, packed = inventories.write(project, tmp_path).read_bytes().split(b"\n", 4)
        assert head[0] == b"# Sphinx inventory version 2"
        lines = zlib.decompress(packed).decode().splitlines()
        assert lines
        assert all(re.fullmatch(r"\S+ [a-z]+:\w+ -?\d+ \S+ .+", line) for line in lines)
