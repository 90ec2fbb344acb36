"""Proof of the lower bounds that the packages promise: ``python -m tools.lowest``.

Environments get the lowest versions of all that our packages ask for directly, and ours from ``dist``. A library that
needs a newer one of another hides that one's bound. So there are two environments, and each bound must be what one of
them got. Tests that use these libraries run in each. torch's bound is not proven: indexes have its old builds for CUDA
only.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
from typing import TYPE_CHECKING

from tools.projects import CONSTRAINTS, ROOT, projects
from tools.testing import marks
from tools.wheels import DIST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["bounds", "main", "requirements", "unproven"]

WORK = ROOT / "build" / "lowest"
LARGE = {
    "q4-actors": {"", "ray"},
    "q4-nvfp4-native": {"triton"},
    "q4-snn": {"", "nir", "plot", "shd"},
    "q4-transformers": {"", "peft"},
    "q4-triton-kernels": {"triton"},
    "q4core": {"examples"},
}
"""Package of ours → its extras that are tried in the second environment, as they need newer versions of others."""
TESTS = {
    "libraries": [
        *("tests/plugins", "tests/schema", "tests/diagnostics", "tests/checkpoint", "conformance/tests"),
        *(f"plugins/{name}/tests" for name in ("cli", "gguf", "lm", "onnx", "quantize", "safetensors")),
    ],
    "large": [f"plugins/{name}/tests" for name in ("actors", "snn", "transformers")],
}
_BOUND = re.compile(r"^([\w.-]+)(?:\[[^]]*\])?\s*>=\s*([\w.]+)")
_OURS = re.compile(r"^q4(core|-)")


def requirements() -> dict[str, dict[str, list[str]]]:
    """Return package of ours → extra → requirements; an empty extra has those that are always needed."""
    return {project.name: project.requirements for project in projects()}


def bounds(needed: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, set[str]]:
    """Return library → its lower bounds in all requirements, without ours and torch.

    Raises:
        ValueError: A requirement has no lower bound; the message names it and its package.
    """
    found: dict[str, set[str]] = {}
    for package, extras in needed.items():
        for line in (line for lines in extras.values() for line in lines):
            match = _BOUND.match(line)
            if match is None and re.fullmatch(r"q4core\[[\w,]+\]", line) is None:
                raise ValueError(f"{package}: requirement {line!r} must have a lower bound, as name>=version")
            if match is not None and not _OURS.match(match[1]) and match[1] != "torch":
                found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), set()).add(match[2])
    return found


def unproven(promised: Mapping[str, set[str]], got: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a sentence for each bound that no environment got; ``got`` has library → version of each."""
    return [
        f"{name}>={bound}: the environments got {sorted({str(item.get(name)) for item in got})}"
        for name, values in sorted(promised.items())
        for bound in sorted(values)
        if not any(_same(item.get(name, ""), bound) for item in got)
    ]


def _same(version: str, bound: str) -> bool:
    """Return whether a version is the first release of a bound: 23.1 is 23.1.0, and 0.24.post1 is 0.24."""
    short = re.sub(r"(\.0)+$", "", re.sub(r"(\.post\d+|\+.*)$", "", version))
    return short == re.sub(r"(\.0)+$", "", bound)


def asked(name: str) -> list[str]:
    """Return what an environment installs: each package of ours with its extras."""
    lines = []
    for package, extras in requirements().items():
        large = LARGE.get(package, set())
        if name == "large":
            chosen = large
        else:
            chosen = {extra for extra, lines in extras.items() if extra not in large and extra != "all"}
            chosen |= {""} if "" in extras and "" not in large else set()
        if package == "q4core" and name != "large":
            chosen = {"cli"}  # its other extras name packages that stand here by themselves
        if chosen:
            named = ",".join(sorted(chosen - {""}))
            lines.append(f"{package}[{named}]" if named else package)
    return lines


def _run(program: Path | str, *arguments: str) -> None:
    subprocess.run([str(program), *arguments], cwd=ROOT, check=True)


def make(name: str) -> dict[str, str]:
    """Make an environment with the lowest versions and the tools of tests; return library → version."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run(python, *pip, "--constraint", str(CONSTRAINTS), "torch")
    torch = _versions(python)["torch"]
    override = WORK / "torch.txt"
    override.write_text(f"torch=={torch}\n", encoding="utf-8")
    uv = ["-m", "uv", "pip", "install", "--quiet", "--python", str(python), "--resolution", "lowest-direct"]
    uv += ["--overrides", str(override), "--find-links", str(DIST), "--reinstall-package", "q4core"]
    _run(sys.executable, *uv, *asked(name))
    got = _versions(python)
    pinned = WORK / f"{name}.txt"
    pinned.write_text("".join(f"{item}=={version}\n" for item, version in got.items()), encoding="utf-8")
    tests = ["hypothesis", "jsonschema", "numpy", "pytest", "pytest-xdist", "safetensors", "scikit-learn", "scipy"]
    _run(python, *pip, "--constraint", str(pinned), "--find-links", str(DIST), *tests)
    return got


def _versions(python: Path) -> dict[str, str]:
    done = subprocess.run(
        [python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"], capture_output=True, check=True
    )
    return {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in json.loads(done.stdout)}


def main() -> int:
    """Make both environments, compare with the bounds, and run the tests; return 1 where anything failed."""
    got = []
    failed = []
    for name, folders in TESTS.items():
        got.append(make(name))
        chosen = sys.argv[1:] or ["-n", "2", *folders]
        command = [str(WORK / name / "bin/python"), "-m", "pytest", "-q", "-m", f"{marks()} and not slow", *chosen]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(f"the tests of {name} failed with its lowest versions")
    failed += unproven(bounds(requirements()), got)
    print("\n".join(failed) or "every lower bound but torch's is proven")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
