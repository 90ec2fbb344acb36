"""Runs the long tests, and stores what they found in benchmarks/results/soak.json: ``python -m tools.soak``.

Only a run without a failure is stored.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import write

__all__ = ["count_tests", "main"]

ROOT = Path(__file__).parents[1]
OPTIONS = ["-v", "-nauto", "--maxprocesses=8", "--dist=loadfile", "--no-loadscope-reorder", "--durations=40"]
PARTS = {"": "soak and not interpreted and not gpu and not peer", "1": "soak and interpreted"}
"""Value of TRITON_INTERPRET → which tests run under it."""


def count_tests(report: Path) -> dict[str, Any]:
    """Return how many tests of each module a report of pytest's holds, and what they took, in seconds."""
    (suite,) = ET.parse(report).getroot().iter("testsuite")  # noqa: S314  # written by pytest a moment ago
    counts = Counter(case.attrib["classname"].rpartition(".")[2] for case in suite.iter("testcase"))
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    return {"seconds": float(suite.attrib["time"]), "tests": tests, "skipped": skipped, "modules": dict(counts)}


def main() -> None:
    """Run both parts, and write the record if nothing failed."""
    found = []
    for interpret, chosen in PARTS.items():
        report = ROOT / "build" / f"soak{interpret}.xml"
        folders = ["plugins"] if interpret else []
        command = [sys.executable, "-m", "pytest", "-m", chosen, *folders, *OPTIONS, f"--junitxml={report}"]
        variables = {"TRITON_INTERPRET": interpret} if interpret else {}
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        found.append({"selected": chosen, **count_tests(report)})
    print(f"wrote {write('soak', {'parts': found})}")


if __name__ == "__main__":
    main()
