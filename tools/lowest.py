"""Proof of the lower bounds that the packages promise: ``python -m tools.lowest``.

Environments get the lowest versions of all that our packages ask for directly, and ours from ``dist``. A library that
needs a newer one of another hides that one's bound. So there are several environments, and each bound must be what one
of them got. Tests that use these libraries run in each; with a name, one environment is made and tested. torch's bound
is not proven: indexes have its old builds for CUDA only. ``nox -s transformers`` tests that library's bound.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from tools.projects import CONSTRAINTS, ROOT, projects
from tools.testing import marks
from tools.wheels import DIST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["APART", "ENVIRONMENTS", "asked", "bounds", "main", "requirements", "unproven"]

WORK = ROOT / "build" / "lowest"
APART: dict[str, dict[str, set[str]]] = {
    "large": {
        "q4-actors": {"ray"},
        "q4-snn": {"nir", "plot", "shd"},
        "q4-transformers": {"", "peft"},
        "q4core": {"examples"},
    },
    "gpu": {
        "q4-nvfp4-native": {"cuda13", "triton"},
        "q4-triton-kernels": {"triton"},
        "q4-um-managed": {"cuda13"},
    },
}
"""Environment → package of ours → extras that are tried there, as they need newer versions of others."""
ENVIRONMENTS = {
    "libraries": [
        *("tests/plugins", "tests/schema", "tests/diagnostics", "tests/checkpoint", "conformance/tests"),
        *(f"plugins/{name}/tests" for name in ("cli", "gguf", "lm", "onnx", "quantize", "safetensors")),
    ],
    "large": [f"plugins/{name}/tests" for name in ("actors", "snn")],
    "gpu": [f"plugins/{name}/tests" for name in ("um-managed", "nvfp4-native", "triton-kernels")],
}
"""Environment → the tests that are run there."""
ALSO = {
    "large": ["q4-conformance", "q4-cpu-native", "q4-dequant-fallback", "q4-um-managed"],
    "gpu": [
        *("q4-actors", "q4-conformance", "q4-dequant-fallback", "q4-dialects"),
        *("q4-programs", "q4-quantize", "q4-safetensors"),
    ],
}
"""Environment → packages of ours that its tests need, whose bounds another one proves."""
_NVRTC = "nvidia-cuda-nvrtc<14 ; sys_platform == 'linux'"  # which compiles without a GPU
TOOLS = ["hypothesis", "jsonschema", "matplotlib", "numpy", _NVRTC, "pytest", "pytest-xdist", "scikit-learn", "scipy"]
_WARNINGS = ["-W", "ignore::DeprecationWarning"]  # an old library calls what newer ones of others will take away
_BOUND = re.compile(r"^([\w.-]+)(?:\[[^]]*\])?\s*>=\s*([\w.]+)")
_OURS = re.compile(r"^q4(core|-)")
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"


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
    """Return whether two versions are equal: 23.1 is 23.1.0."""
    short, least = (re.sub(r"(\.0)+$", "", text) for text in (version, bound))
    return short == least


def asked(name: str) -> list[str]:
    """Return what an environment installs: packages of ours with extras, and what these ask for directly."""
    lines = []
    for package, extras in requirements().items():
        if name in APART:
            chosen = APART[name].get(package, set())
        else:
            chosen = set(extras).difference({"all"}, *(packages.get(package, set()) for packages in APART.values()))
        if package == "q4core" and name not in APART:
            chosen = {"", "cli"}  # its other extras name packages that are in this list by themselves
        if chosen:
            named = ",".join(sorted(chosen - {""}))
            lines.append(f"{package}[{named}]" if named else package)
            lines += [line for extra in sorted(chosen) for line in extras[extra] if not _OURS.match(line)]
    return lines + ALSO.get(name, [])


def _run(*command: object) -> None:
    subprocess.run([*map(str, command)], cwd=ROOT, check=True)


def _environment(name: str) -> Path:
    """Make an empty environment and return its Python."""
    shutil.rmtree(WORK / name, ignore_errors=True)
    venv.create(WORK / name, with_pip=True, symlinks=True)
    return WORK / name / "bin" / "python"


def make(name: str, base: Path) -> dict[str, str]:
    """Make an environment with the lowest versions, and the tools of tests; return library → version.

    Args:
        name: Of the environment.
        base: The Python of an environment with torch, which this one sees after its own packages.
    """
    python = _environment(name)
    own, other = (
        subprocess.run([item, "-c", _SITE], capture_output=True, check=True, text=True).stdout
        for item in (python, base)
    )
    Path(own, "_base.pth").write_text(f"import site; site.addsitedir({other!r})\n", encoding="utf-8")
    given, without, lowest, tools = (WORK / f"{name}-{what}.txt" for what in ("asked", "without", "lowest", "tools"))
    given.write_text("\n".join(asked(name)) + "\n", encoding="utf-8")
    without.write_text("torch\n", encoding="utf-8")
    uv = [sys.executable, "-m", "uv", "pip"]
    source = ["--quiet", "--python", python, "--find-links", DIST]
    source += [word for project in projects() for word in ("--refresh-package", project.name)]  # of the same version
    plain = ["--excludes", without, "--no-header", "--no-annotate"]
    _run(*uv, "compile", *source, *plain, "--resolution", "lowest-direct", "--output-file", lowest, given)
    pinned = lowest.read_text(encoding="utf-8")
    tools.write_text(pinned + "\n".join(TOOLS) + "\n", encoding="utf-8")
    _run(*uv, "install", *source, "--excludes", without, "--requirements", tools)
    return dict(re.findall(r"^([\w.-]+)==(\S+)", pinned, re.MULTILINE))


def main() -> int:
    """Make the environments, run their tests, and compare with the bounds; return 1 where anything failed."""
    failed = []
    got = []
    base = _environment("torch")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run(base, *pip, "--constraint", CONSTRAINTS, "torch")
    for name in sys.argv[1:] or ENVIRONMENTS:
        got.append(make(name, base))
        print(f"{name}: {len(got[-1])} packages at their lowest versions", flush=True)
        python = WORK / name / "bin" / "python"
        command = [python, "-m", "pytest", "-q", "-n", "2", "-m", f"{marks()} and not slow", *_WARNINGS]
        command += ENVIRONMENTS[name]
        if subprocess.run([*map(str, command)], cwd=ROOT, check=False).returncode:
            failed.append(f"tests failed with the lowest versions of {name}")
    if not sys.argv[1:]:
        failed += unproven(bounds(requirements()), got)
    print("\n".join(failed) or "every lower bound but torch's is proven")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
