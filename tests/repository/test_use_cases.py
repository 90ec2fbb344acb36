"""Every use case has contract cases, and every contract case a use case, a check and a planted fault."""

from __future__ import annotations

import re
from pathlib import Path

from q4_conformance.contract.case import CHECKS
from tests.support.parts import TABLES, UNCAUGHT, catchers
from tests.support.use_cases import USE_CASES, USES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CERTIFICATES = DOCS / "certificates"
BY_A_LIBRARY = {"TC-13": ("actors", "violations(")}
"""Contract case → the package whose tests prove it, and the call that judges there."""


def test_every_contract_case_has_a_check_and_a_fault() -> None:
    """Each contract case has cases whose checks exist, and catches a planted fault; only a GPU's may catch none.

    What a library proves has tests that name the contract case there.
    """
    cases = [case for table in TABLES.values() for case in table]
    assert {case.contract for case in cases} == USES.keys() - BY_A_LIBRARY.keys()
    assert {case.check for case in cases} <= CHECKS.keys()
    caught = {part.split("/")[0] for _, found in catchers() for _, part in found}
    on_gpus = {part.split("/")[0] for _, part in UNCAUGHT}
    assert USES.keys() - BY_A_LIBRARY.keys() - caught == {"EX-18"}
    assert "EX-18" in on_gpus
    for contract, (package, judge) in BY_A_LIBRARY.items():
        tests = [path.read_text(encoding="utf-8") for path in (ROOT / "plugins" / package).glob("tests/test_*.py")]
        assert sum(f"({contract})" in text and judge in text for text in tests) > 1


def test_the_contract_is_whole() -> None:
    """Every contract case of the contract has its use cases, and names only those that exist."""
    assert {name for name in USES if name.startswith("TC")} == {f"TC-{number:02d}" for number in range(1, 24)}
    assert {name for name in USES if name.startswith("EX")} >= {f"EX-{number:02d}" for number in range(1, 19)}
    assert {use for uses in USES.values() for use in uses} == set(USE_CASES)


def test_use_cases_are_documented() -> None:
    """docs/use-cases.md has each use case, under its id and title, with the contract cases that prove it."""
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
