"""The example distribution: built, installed with our wheels, certified there, and failed with a planted fault."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.support import fresh

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE = fresh.ROOT / "examples/q4-example-backend"
MODULE = EXAMPLE / "src/q4_example_backend/__init__.py"
TESTS = EXAMPLE / "tests/test_conformance.py"
FAULTS = {
    "swapped nibbles": ("(codes[part] >> 4, codes[part] & 15)", "(codes[part] & 15, codes[part] >> 4)"),
    "no bias for many rows": ("if bias is not None:", "if bias is not None and len(x) < 4:"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the core, the reference, the kit and the example, each from its wheel."""
    base = tmp_path_factory.mktemp("example") / "env"
    others = [
        fresh.ROOT / folder for folder in ("plugins/cli", "plugins/dequant-fallback", "plugins/quantize", "conformance")
    ]
    ours = [fresh.ROOT, *others, EXAMPLE]
    fresh.make_environment(base, ours)
    return base


def certify(base: Path, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the example's own test module there, and return pytest's status and what it says."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS, *arguments]
    done = fresh.run(base / "bin/python", *command, folder=folder)
    return done.returncode, done.stdout + done.stderr


def test_its_test_module_is_short() -> None:
    """An author writes at most fifteen lines."""
    assert len(TESTS.read_text(encoding="utf-8").splitlines()) <= 15


@pytest.mark.soak
def test_it_holds_the_contract(base: Path, tmp_path: Path) -> None:
    """Every case of what it declares passes, and nothing comes from this folder."""
    status, text = certify(base, tmp_path, "--q4-report", "report")
    assert status == 0, text
    cases, passed = re.findall(r"example-backend: passed; (\d+) cases: (\d+) pass", text)[0]
    page = (fresh.ROOT / "docs/write-a-backend/certify.md").read_text(encoding="utf-8")
    assert re.findall(r"^nf4 +(\d+) +(\d+)$", page, re.MULTILINE) == [(cases, passed)]
    undeclared = re.findall(r"^not declared: .*, \d+ cases$", text, re.MULTILINE)
    assert re.findall(r"^not declared: .*, \d+ cases$", page, re.MULTILINE) == undeclared
    document = json.loads((tmp_path / "report/certificate.json").read_text(encoding="utf-8"))
    assert (document["standing"], document["subject"]["name"]) == ("certified", "example-backend")
    verified = fresh.run(
        base / "bin/python", "-m", "q4_cli", "conform", "--verify", "report/certificate.json", folder=tmp_path
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(base: Path, tmp_path: Path, fault: str) -> None:
    """One wrong line in the installed package, and the same command says so."""
    installed = fresh.site_packages(base) / "q4_example_backend/__init__.py"
    right = installed.read_text(encoding="utf-8")
    assert right == MODULE.read_text(encoding="utf-8")
    line, wrong = FAULTS[fault]
    assert right.count(line) == 1
    installed.write_text(right.replace(line, wrong), encoding="utf-8")
    try:
        status, text = certify(base, tmp_path, "-k", "TC-09")
    finally:
        installed.write_text(right, encoding="utf-8")
    assert status == 1, text
    assert "example-backend: NOT PASSED" in text
    assert re.search(r"FAIL +TC-09/", text), text
