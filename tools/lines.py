"""Lines of source by package, without tests, beside each package's budget: ``python -m tools.lines``."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["BUDGETS", "count_lines"]

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".cpp", ".h", ".cu"}
BUDGETS: dict[str, int | None] = {
    "q4core": 10_000,
    "plugins/safetensors": 1_000,
    "plugins/cli": 2_300,
    "plugins/actors": 5_500,
    "plugins/nn": 6_000,
    "plugins/snn": 2_000,
    "plugins/dialects": None,
    "plugins/gguf": None,
    "plugins/dequant-fallback": None,
    "plugins/cpu-native": None,
    "plugins/nf4-cuda": None,
    "plugins/nvfp4-native": None,
    "plugins/triton-kernels": None,
    "plugins/um-managed": None,
    "conformance": 10_500,
    "conformance/faults": 3_200,
}
"""Folder of a package → the most lines that it may have, where there is a budget."""


def count_lines(folder: str) -> int:
    """Return the lines of Python and native source that git tracks in a package, without its tests."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    inner = [other for other in BUDGETS if other.startswith(f"{folder}/")]
    total = 0
    for name in listed:
        path = ROOT / name
        is_inner = any(name.startswith(f"{other}/") for other in inner)
        if path.suffix in SUFFIXES and path.is_file() and not is_inner and not _is_no_source(path):
            total += len(path.read_text(encoding="utf-8").splitlines())
    return total


def _is_no_source(path: Path) -> bool:
    return bool({"tests", "golden", "examples"} & set(path.relative_to(ROOT).parts))


def main() -> None:
    """Print a line for each package."""
    print(f"{'package':<26}{'lines':>8}{'budget':>9}")
    for folder, budget in BUDGETS.items():
        count = count_lines(folder)
        mark = "  over" if budget is not None and count > budget else ""
        print(f"{folder:<26}{count:>8,}{'–' if budget is None else format(budget, ','):>9}{mark}")


if __name__ == "__main__":
    main()
