"""Every use case has a case, every case a use case and a test, and the page that says so is up to date."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs
import pytest

from tests.support.parts import catchers
from tests.support.running import files_by_part, part_in
from tools.traceability import CERTIFICATES, PAGE, SHOWN_BY, certificates, page_of, parts, problems, tables, unshown
from tools.use_cases import USE_CASES, USES, uses_of

if TYPE_CHECKING:
    from pathlib import Path

DOCS = PAGE.parent


def test_nothing_is_missing() -> None:
    """No use case is without a case, no case without a use case or a test."""
    assert problems(tables(), parts()) == []


def test_page_is_up_to_date() -> None:
    """The page is what ``python -m tools.traceability`` writes."""
    assert PAGE.read_text(encoding="utf-8") == page_of(tables(), parts(), certificates())


def test_every_contract_case_passes_somewhere_or_names_a_command() -> None:
    """Each contract case passes in a certificate, or a command is named that shows it; only kernels' need a GPU."""
    assert unshown(certificates()) == []
    assert {"TC-09", "EX-01"} <= {*unshown({})}
    assert [name for name, command in SHOWN_BY.items() if "gpu" in command] == ["EX-13", "EX-18"]


def test_use_cases_are_told() -> None:
    """docs/use-cases.md tells each use case, under its id and title, with the contract cases that prove it."""
    text = (DOCS / "use-cases.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (UC-\d+): (.+)$", text, re.MULTILINE) == list(USE_CASES.items())
    for use, part in zip(USE_CASES, re.split(r"^## UC-", text, flags=re.MULTILINE)[1:], strict=True):
        proved = part.split("**Proved by:**")[1]
        assert re.findall(r"(?:TC|EX)-\d+", proved) == [contract for contract, uses in USES.items() if use in uses]


def test_every_certificate_is_linked() -> None:
    """The list of certificates has each folder's page, once, and says of each whether it is a certificate."""
    text = (CERTIFICATES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\|.*\| \[(.+)\]\((.+)\), a (\w+) \|$", text, re.MULTILINE)
    pages = [(page.parent.name, f"{page.parent.name}/{page.name}", page.stem) for page in CERTIFICATES.glob("*/*.md")]
    assert sorted(listed) == sorted(pages)


def test_a_use_case_without_a_case_shows() -> None:
    """Without its cases, UC-07 is reported; so is a case that nothing says the use of, and a part without a test."""
    found = tables()
    wanted = [attrs.evolve(t, cases=tuple(c for c in t.cases if "UC-07" not in uses_of(c.contract))) for t in found]
    assert problems(wanted, ()) == ["UC-07 has no case"]
    stranger = attrs.evolve(found[0], cases=(attrs.evolve(found[0].cases[0], contract="TC-99"),))
    assert problems([*found, stranger], ()) == ["TC-99 proves no use case"]
    untested = attrs.evolve(parts()[0], tests=())
    assert problems(found, [untested]) == [f"no test runs {untested.name} of the table {untested.table!r}"]
    with pytest.raises(LookupError, match="TC-99"):
        uses_of("TC-99")


@pytest.mark.parametrize(
    ("test", "wanted"),
    [
        ("tests/a.py::test_case[avx2-TC-09/bias/nf4-plain-s0/float32/exact]", {("linear", "TC-09/bias")}),
        ("tests/a.py::test_case[nf4-cuda, TC-16/picked/nf4-plain/float16/exact]", {("device", "TC-16/picked")}),
        ("tests/a.py::test_case[TC-02/detect]", {("core", "TC-02/detect")}),
        ("tests/a.py::test_case[TC-02/detect/mxfp4]", {("dialect", "TC-02/detect")}),
        ("tests/a.py::test_case[TC-23/storage-no driver]", {("memory", "TC-23/storage")}),
        ("tests/a.py::test_fault[fault-ignores-bias]", {("linear", "TC-09/bias")}),
        ("tests/a.py::test_fault[doubles-the-blocks]", {("core", "TC-02/detect")}),
        ("tests/a.py::test_all[TC-16-nf4-cuda]", set()),
        ("tests/a.py::test_one", set()),
    ],
)
def test_a_test_runs_the_part_that_its_id_names(test: str, wanted: set[tuple[str, str]]) -> None:
    """A test stands for the part of the case in its id, or of the case that must catch the fault in it; else none."""
    assert part_in(test, dict(catchers())) == wanted


def test_a_file_stands_for_what_it_runs_alone() -> None:
    """A file that runs one part of a table is no test of the table's others."""
    found = files_by_part(["tests/a.py::test_case[TC-09/bias/nf4/float32/exact]"])
    assert found["linear", "TC-09/bias"] == ("tests/a.py",)
    assert not any(files for part, files in found.items() if part != ("linear", "TC-09/bias"))


def test_the_contract_is_whole() -> None:
    """Every contract case of the contract has its use cases, and names only those that there are."""
    assert {name for name in USES if name.startswith("TC")} == {f"TC-{number:02d}" for number in range(1, 24)}
    assert {name for name in USES if name.startswith("EX")} >= {f"EX-{number:02d}" for number in range(1, 19)}
    assert {use for uses in USES.values() for use in uses} == set(USE_CASES)


def test_tests_and_plugins_are_found() -> None:
    """Known tests and plugins stand where they belong, and no test for a part that it leaves out."""
    tests = {(part.table, part.name): part.tests for part in parts()}
    pretended = "tests/contract/test_pretended_cuda.py"
    assert "tests/contract/test_core.py" in tests["core", "TC-01/detect"]
    assert "tests/contract/test_kernel.py" in tests["backend", "EX-07/compile"]
    assert pretended in tests["device", "TC-16/picked"]
    assert pretended not in tests["backend", "EX-07/compile"]
    assert tests["device", "EX-18/graph"] == ()
    by_name = {table.name: table for table in tables()}
    assert by_name["core"].plugins == ("q4core",)
    assert {"dequant-fallback", "cpu-native"} <= set(by_name["linear"].plugins)
    assert "dialects" not in by_name["linear"].plugins


def test_certificates_are_counted(tmp_path: Path) -> None:
    """A certificate's results are counted by contract case; where there is none, the page says so."""
    page = "| TC-09/values | text | ✗ 1/2 | ✓ 4 |\n| TC-01/detect | text | – 1 |  |\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "certificate.md").write_text(page, encoding="utf-8")
    assert certificates(tmp_path) == {"mine": {"TC-09": {"fail": 1, "pass": 4}, "TC-01": {"not_declared": 1}}}
    lines = page_of(tables(), parts(), certificates(tmp_path)).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in reversed(lines)}
    assert rows["TC-09"].endswith("| mine: 1 fail, 4 pass |")
    assert rows["TC-01"].endswith("| mine: 1 not_declared |")
    assert rows["TC-03"].endswith("| none yet |")
