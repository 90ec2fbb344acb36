"""Which tests run which part of the contract: told by the ids that pytest collects, not by what a file names."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.limits import scaled
from tests.support.parts import catchers, parts

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["collected", "files_by_part", "part_in"]

ROOT = Path(__file__).parents[2]
_TESTS = ("tests/contract/test_*.py", "plugins/*/tests/test_*.py")
_RUNS = re.compile(r"\b(run_case|run_cases|run_isolated|check_core|check_linear)\b")
_IN_CI = "not soak and not gpu and not peer"
_WHOLE = {"core", "memory"}
"""Tables whose cases' ids end with the part."""


@functools.cache
def collected() -> tuple[str, ...]:
    """Return the id of every test that CI runs, in the files that run cases of the kit.

    Raises:
        RuntimeError: pytest could not collect them.
    """
    files = [path for pattern in _TESTS for path in sorted(ROOT.glob(pattern))]
    chosen = [str(path.relative_to(ROOT)) for path in files if _RUNS.search(path.read_text(encoding="utf-8"))]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", _IN_CI]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run(
        [*command, *chosen], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=scaled(600), check=False
    )
    if done.returncode:
        raise RuntimeError(f"pytest could not collect: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return tuple(line for line in done.stdout.splitlines() if "::" in line)


def part_in(test: str, faults: dict[str, set[tuple[str, str]]]) -> set[tuple[str, str]]:
    """Return (table, part) of the case that a test's parameters name, or that is to catch the fault that they name.

    Args:
        test: The test's id.
        faults: Name of each planted fault → the parts that are meant to catch it.
    """
    words = test.partition("[")[2].removesuffix("]")
    if words in faults:
        return faults[words]
    start = re.search(r"\b(TC|EX)-\d\d/", words)
    if start is None:
        return set()
    named = words[start.start() :]
    found = [
        (table, part)
        for table, part in parts()
        if named.startswith(part) and named[len(part) :][:1] in (("", "-") if table in _WHOLE else ("/",))
    ]
    longest = max((len(part) for _, part in found), default=0)
    return {(table, part) for table, part in found if len(part) == longest}


def files_by_part(tests: Iterable[str]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return (table, part) → the files with tests that run a case of it."""
    faults = dict(catchers())
    found: dict[tuple[str, str], dict[str, None]] = {part: {} for part in parts()}
    for test in tests:
        for part in part_in(test, faults):
            found[part][test.partition("::")[0]] = None
    return {part: tuple(files) for part, files in found.items()}
