"""Training of the learning examples, with results in benchmarks/results/examples.json.

``python -m tools.examples [PYTEST OPTION …]``: ``-k text`` trains one and replaces its result alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, environment, write

__all__ = ["main", "read_figures"]

ROOT = Path(__file__).parents[1]
TESTS = "tests/repository/test_learning_examples.py"


def read_figures(report: Path) -> dict[str, dict[str, Any]]:
    """Return the seconds and the recorded figures of each test in a report of pytest's that recorded any."""
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314  # written by pytest a moment ago
        figures = {item.attrib["name"]: json.loads(item.attrib["value"]) for item in case.iter("property")}
        if figures:
            found[case.attrib["name"]] = {"seconds": float(case.attrib["time"]), **figures}
    return found


def main(options: list[str]) -> None:
    """Run the tests that train, and store their figures if all pass.

    Raises:
        SystemExit: A test failed.
    """
    facts = {key: environment()[key] for key in ("commit", "date")}
    report = ROOT / "build" / "examples.xml"
    written = [f"--junitxml={report}", "-o", "junit_family=xunit1"]  # the family that holds a test's own figures
    command = [sys.executable, "-m", "pytest", "-m", "training", TESTS, *written, *options]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    stored = RESULTS / "examples.json"
    examples = json.loads(stored.read_text(encoding="utf-8"))["examples"] if stored.is_file() else {}
    examples |= {name: facts | record for name, record in read_figures(report).items()}
    print(f"wrote {write('examples', {'examples': examples})}")


if __name__ == "__main__":
    main(sys.argv[1:])
