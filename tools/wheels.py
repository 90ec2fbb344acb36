"""Files of every distribution: sdists, wheels, checks and an SBOM in ``dist``: ``python -m tools.wheels``.

Every wheel is built from its sdist, in a folder of its own. Times in the files are those of the last commit that
touched a distribution, so the same commit gives the same bytes anywhere. A compiled wheel is reused while its sdist,
Python, build tools and compiler are the same, because compiling takes minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tarfile
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

from tools.progress import CommandError, run_command
from tools.projects import BUILDERS, CONSTRAINTS, ROOT, Project, projects
from tools.sbom import bill, check_bill

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DIST", "Build", "BuildError", "epoch", "hashes", "placeholders"]

DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"
OPENMP = "libgomp.so.1"  # torch brings it, and the kernels share torch's threads: decision 0011


class BuildError(RuntimeError):
    """A distribution that cannot be built, or files of it that are not as they must be."""


def _run(*command: object, cwd: Path = ROOT, shown: bool = False, **variables: str) -> str:
    """Run a command with the programs of this environment first on the path, and return its output."""
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return run_command([*map(str, command)], cwd=cwd, variables=variables, shown=shown)


def epoch(project: Project) -> str:
    """Return the time that its files get: SOURCE_DATE_EPOCH, or that of the last commit that touched it."""
    if value := os.environ.get("SOURCE_DATE_EPOCH"):
        return value
    paths = project.paths or ["."]
    text = _run("git", "log", "-1", "--format=%at", "--", *paths, cwd=project.folder).strip()
    if not text.isdecimal():
        raise BuildError(f"{project.name}: no commit has its files, so its time is unknown. Set SOURCE_DATE_EPOCH.")
    return text


class Build:
    """A build of distributions into a folder, which loses the files that they had there.

    Args:
        target: Folder of the files.
        work: Folder of unpacked sdists.
        pythons: Pythons to compile for; the first one builds what is pure, too.
        store: Folder of compiled wheels to reuse and to add to; None to compile everything anew.
    """

    def __init__(self, target: Path, work: Path, pythons: Sequence[str], store: Path | None = None) -> None:
        self.target = target
        self.work = work
        self.pythons = pythons
        self.store = store
        target.mkdir(parents=True, exist_ok=True)

    def run(self, project: Project) -> list[Path]:
        """Build the sdist and the wheels of a distribution; return the files.

        Raises:
            BuildError: Files have other names than they must have.
            CommandError: A builder fails; its last lines are in the message.
        """
        for file in (
            *self.target.glob(f"{project.module}-[0-9]*.tar.gz"),
            *self.target.glob(f"{project.module}-[0-9]*.whl"),
        ):
            file.unlink()
        time_of = epoch(project)
        sdist = self._sdist(project, time_of)
        if not project.native:
            return [sdist, self._wheel(project, sdist, time_of, self.pythons[0])]
        wheels = [self._compiled(project, sdist, time_of, python) for python in self.pythons]
        if plain := [wheel.name for wheel in wheels if "-linux_" in wheel.name]:
            raise BuildError(f"{project.name}: a wheel for Linux must have a manylinux tag, got {plain}")
        return [sdist, *wheels]

    def _sdist(self, project: Project, time_of: str) -> Path:
        command = (sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", self.target, project.folder)
        _run(*command, SOURCE_DATE_EPOCH=time_of)
        file = self.target / f"{project.module}-{project.version}.tar.gz"
        if not file.is_file():
            raise BuildError(f"{project.name}: {file.name} must be built, got {sorted(self.target.glob('*.tar.gz'))}")
        return file

    def _wheel(self, project: Project, sdist: Path, time_of: str, python: str) -> Path:
        work = self.work / project.module
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(work, filter="data")
        (source,) = work.iterdir()
        made = work / "wheel"
        command = (python, "-m", "build", "--wheel", "--no-isolation", "--outdir", made, source)
        flags = f"{os.environ.get('CXXFLAGS', '')} -ffile-prefix-map={source}=."  # where it is built shows nowhere
        _run(*command, shown=project.native, SOURCE_DATE_EPOCH=time_of, CXXFLAGS=flags.strip())
        (wheel,) = made.glob("*.whl")
        if "-linux_" in wheel.name:
            repair = (sys.executable, "-m", "auditwheel", "repair", "--exclude", OPENMP, "-w", work / "repaired", wheel)
            _run(*repair, SOURCE_DATE_EPOCH=time_of)
            (wheel,) = (work / "repaired").glob("*.whl")
        return Path(shutil.copy2(wheel, self.target))

    def _compiled(self, project: Project, sdist: Path, time_of: str, python: str) -> Path:
        """Return the wheel of the store, or make it."""
        stored = None
        if self.store is not None:
            key = hashlib.sha256(sdist.read_bytes() + _identity(python).encode()).hexdigest()
            stored = self.store / key
            if found := list(stored.glob("*.whl")):
                print(f"{project.name}: compiled before for {python}", flush=True)
                return Path(shutil.copy2(found[0], self.target))
        print(f"{project.name}: compiling for {python}", flush=True)
        wheel = self._wheel(project, sdist, time_of, python)
        if stored is not None:
            stored.mkdir(parents=True)
            shutil.copy2(wheel, stored)
        return wheel


def _builder(python: str) -> str:
    """Return the Python of an environment with the build tools for another Python, made once."""
    version = _run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2], end='')")
    program = WORK / f"python-{version}" / "bin" / "python"
    if not program.exists():
        print(f"installing the build tools for Python {version}", flush=True)
        _run(python, "-m", "venv", program.parents[1])
        _run(program, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, "build", *BUILDERS)
    return str(program)


def _identity(python: str) -> str:
    """Return what decides a compiled wheel, besides its sources: the Python and the compiler."""
    tag = _run(python, "-c", "import sysconfig, sys; print(sysconfig.get_config_var('EXT_SUFFIX'), sys.version)")
    builders = _run(python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
    return tag + builders + _run(os.environ.get("CXX", "c++"), "--version")


def hashes(folder: Path) -> dict[str, str]:
    """Return file name → sha256 of the sdists and wheels in a folder."""
    files = sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")])
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def placeholders() -> list[str]:
    """Return the servers in the distributions' addresses that are nobody's: those below ``.example`` (RFC 2606)."""
    urls = {urllib.parse.urlsplit(url) for project in projects() for url in project.table["urls"].values()}
    return sorted({f"{url.scheme}://{url.netloc}" for url in urls if url.netloc.endswith(".example")})


def build_all(build: Build, chosen: Sequence[str] = ()) -> dict[str, str]:
    """Build every distribution, or those chosen, and check the files as an index would; return file name → sha256."""
    for project in projects():
        if not chosen or project.name in chosen:
            started = time.monotonic()
            files = build.run(project)
            print(f"{time.monotonic() - started:6.1f} s  {', '.join(file.name for file in files)}", flush=True)
    found = hashes(build.target)
    _run(sys.executable, "-m", "twine", "check", "--strict", *(build.target / name for name in found))
    print(f"{len(found)} files, twine check --strict: passed", flush=True)
    return found


def main() -> int:
    """Build what the arguments ask for; return 1 where a build fails, or a second one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="a further Python to compile for; repeatable")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a distribution; repeatable")
    parser.add_argument("--again", action="store_true", help="build all of it a second time elsewhere, and compare")
    options = parser.parse_args()
    shutil.rmtree(WORK / "dist", ignore_errors=True)
    if not options.only:
        shutil.rmtree(DIST, ignore_errors=True)
    try:
        pythons = [sys.executable, *map(_builder, options.python)]
        first = build_all(Build(DIST, WORK / "once", pythons, WORK / "compiled"), options.only)
        document = bill(DIST)
        check_bill(document)
        (DIST / "q4core.cdx.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        sums = "".join(f"{value}  {name}\n" for name, value in first.items())
        (DIST / "SHA256SUMS").write_text(sums, encoding="utf-8")
        print(f"{len(document['components'])} components in dist/q4core.cdx.json, which follows CycloneDX 1.6")
        for address in placeholders():
            print(f"{address} in the metadata is a placeholder that leads nowhere: replace it before an upload")
        if options.again:
            second = build_all(Build(WORK / "dist", WORK / "again", pythons), options.only)
            other = sorted(name for name, value in second.items() if first.get(name) != value)
            result = f"other bytes: {', '.join(other)}" if other else "the same bytes"
            print(f"a second build of {len(second)} files gave {result}")
            return int(bool(other))
    except (BuildError, CommandError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
