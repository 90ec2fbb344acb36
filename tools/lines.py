"""Lines of source by package, without tests: ``python -m tools.lines`` fails where a package exceeds its budget."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

__all__ = ["BUDGETS", "SUFFIXES", "count_lines", "problems"]

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".cpp", ".c", ".h", ".hpp", ".cu", ".cuh"}
NO_SOURCE = {"tests", "golden", "examples"}
BUDGETS: dict[str, int | None] = {
    "q4core": 12_140,
    "plugins/actors": 7_400,
    "plugins/cli": 3_800,
    "plugins/cpu-native": None,
    "plugins/dequant-fallback": None,
    "plugins/dialects": None,
    "plugins/gguf": None,
    "plugins/lm": 8_460,
    "plugins/nf4-cuda": None,
    "plugins/nn": 5_890,
    "plugins/nvfp4-native": None,
    "plugins/onnx": None,
    "plugins/programs": 3_320,
    "plugins/quantize": 1_100,
    "plugins/safetensors": 1_240,
    "plugins/snn": 8_100,
    "plugins/transformers": 4_250,
    "plugins/triton-kernels": None,
    "plugins/um-managed": 3_200,
    "plugins/vllm": None,
    "conformance": 12_310,
    "conformance/faults": 3_990,
    "benchmarks": None,
    "docs": None,
    "tools": None,
    ".": None,
}
"""Folder → the most lines that its source may have, ``None`` without a budget. Decision 0024 has the reasons."""


def count_lines(files: dict[str, int]) -> tuple[Counter[str], list[str]]:
    """Add up lines of files by the innermost folder of the table; return also the files that lie in none of them."""
    totals: Counter[str] = Counter()
    unlisted = []
    for name, lines in files.items():
        path = PurePosixPath(name)
        if path.suffix not in SUFFIXES or NO_SOURCE & set(path.parts):
            continue
        folder = next((str(parent) for parent in path.parents if str(parent) in BUDGETS), ".")
        if folder == "." and len(path.parts) > 1:
            unlisted.append(name)
        totals[folder] += lines
    return totals, unlisted


def problems(totals: Counter[str], unlisted: list[str]) -> list[str]:
    """Return a sentence for each budget that is exceeded and each file outside the folders of the table."""
    found = [
        f"{folder} has {totals[folder]:,} lines, its budget is {budget:,}: cut it, or change decision 0024"
        for folder, budget in BUDGETS.items()
        if budget is not None and totals[folder] > budget
    ]
    return found + [f"{name} lies in no folder of the table in tools/lines.py" for name in unlisted]


def main() -> int:
    """Print a line for each folder; return 1 where a budget is exceeded."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = {name: ROOT / name for name in listed if PurePosixPath(name).suffix in SUFFIXES}
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in paths.items() if path.is_file()
    }
    totals, unlisted = count_lines(lengths)
    print(f"{'folder':<26}{'lines':>8}{'budget':>9}")
    for folder, budget in BUDGETS.items():
        print(f"{folder:<26}{totals[folder]:>8,}{'–' if budget is None else format(budget, ','):>9}")
    for sentence in (found := problems(totals, unlisted)):
        print(sentence, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
