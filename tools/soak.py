"""Long tests, with results in benchmarks/results/soak.json: ``python -m tools.soak [PART …]``.

Each part that passes is stored with commit and date. It can be run alone when its code has changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, environment, write
from tools.certificates import JUDGED, judge

__all__ = ["PARTS", "count_tests", "main"]

ROOT = Path(__file__).parents[1]
OPTIONS = ["-v", "-nauto", "--maxprocesses=8", "--durations=20"]
PARTS = {
    "contract": ["tests"],
    "kit": ["conformance"],
    "files": ["plugins/cli", "plugins/dialects", "plugins/gguf", "plugins/onnx", "plugins/safetensors"],
    "actors": ["plugins/actors", "plugins/snn"],
    "networks": ["plugins/lm", "plugins/nn"],
    "cpu-native": ["plugins/cpu-native"],
    "gpu-programs": ["plugins/triton-kernels"],
    "emulated": ["plugins/nvfp4-native"],
    "interpreted": ["plugins/nf4-cuda", "plugins/nvfp4-native", "tests/repository/test_gpu_benchmark.py"],
    "models": ["plugins/transformers/tests/peers", "tests/peers"],
    "certificates": [],
}
"""Part → the folders whose tests it runs; ``interpreted`` those under Triton's interpreter, ``models`` those with
other libraries, the others the rest. ``certificates`` judges by every case, and compares with the committed pages."""


def count_tests(report: Path) -> dict[str, Any]:
    """Return the number of tests by module in a report of pytest's, and their duration in seconds."""
    (suite,) = ET.parse(report).getroot().iter("testsuite")  # noqa: S314  # written by pytest a moment ago
    counts = Counter(case.attrib["classname"].rpartition(".")[2] for case in suite.iter("testcase"))
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    return {"seconds": float(suite.attrib["time"]), "tests": tests, "skipped": skipped, "modules": dict(counts)}


def run_part(name: str) -> dict[str, Any]:
    """Run one part, and return its record.

    Raises:
        SystemExit: A test failed, or a case ended otherwise than in a committed page.
    """
    facts = {key: environment()[key] for key in ("commit", "date")}
    if name == "certificates":
        started = time.monotonic()
        bad = [item for item in JUDGED if judge(item)]
        if bad:
            raise SystemExit(f"other outcomes than in the pages of {', '.join(bad)}")
        return facts | {"seconds": round(time.monotonic() - started, 1), "judged": [*JUDGED]}
    report = ROOT / "build" / f"soak-{name}.xml"
    is_interpreted, is_peer = name == "interpreted", name == "models"
    chosen = f"soak and {'' if is_interpreted else 'not '}interpreted and not gpu and {'' if is_peer else 'not '}peer"
    shared = "loadfile" if name == "gpu-programs" else "load"  # these are compiled at once, on every core
    options = [*OPTIONS, f"--dist={shared}", f"--junitxml={report}"]
    python = ROOT / ".nox/peerenv/bin/python" if is_peer else sys.executable
    command = [str(python), "-m", "pytest", "-m", chosen, *PARTS[name], *options]
    variables = {"TRITON_INTERPRET": "1"} if is_interpreted else {}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    record = facts | count_tests(report)
    return record | ({"families": _families()} if is_peer else {})


def _families() -> dict[str, Any]:
    """Return the families of transformers that ``test_families.py`` tried, and the others with the reasons."""
    found = json.loads((ROOT / "build/families-nf4.json").read_text(encoding="utf-8"))
    return {**found, "tried": sorted(found["tried"])}


def main(names: list[str]) -> None:
    """Run some parts, or all, and store each that ends without a failure; the first failure ends the run."""
    unknown = sorted({*names} - PARTS.keys())
    if unknown:
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in names or PARTS:
        record = run_part(name)
        stored = RESULTS / "soak.json"
        parts = json.loads(stored.read_text(encoding="utf-8"))["parts"] if stored.is_file() else {}
        print(f"wrote {write('soak', {'parts': {**parts, name: record}})}")


if __name__ == "__main__":
    main(sys.argv[1:])
