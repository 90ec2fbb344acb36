"""Environments of nox that several sessions share, and installations that are made once."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nox

from tools.projects import BUILDERS, CONSTRAINTS, ROOT, Project, distributions, projects

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ggml_build",
    "install",
    "install_engine",
    "install_group",
    "install_packages",
    "link",
    "make_environment",
    "put_apart",
    "run",
]

PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PEER_PACKAGES = {"transformers"}
"""Packages whose library is large: outside of ``peerenv`` they can be linted, not imported."""
COMPILED = {project.folder.name for project in projects() if project.native}
"""Installations that compile: each step is shown as it ends."""
LARGE = {"torch", "model", "models", "minilm", "bench"}  # installations whose progress is worth showing


def run(session: nox.Session, program: str, *arguments: str, environment: str = "env", **variables: str) -> None:
    """Run a program of an environment, with that environment's programs first on the path."""
    folder = _folder(session, environment)
    variables["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    session.run(str(folder / program), *arguments, external=True, env=variables)


def install(session: nox.Session, name: str, *requirements: str, environment: str = "env", **variables: str) -> None:
    """Install requirements once: again only after one of the files that decide their versions has changed."""
    if _is_installed(session, name, requirements, environment):
        session.log(f"{name}: already installed")
        return
    pip = ["-m", "pip", "install", "--disable-pip-version-check", "--constraint", str(CONSTRAINTS)]
    if name in COMPILED:
        pip = ["-m", "tools.progress", "python", *pip, "--verbose"]
    elif name not in LARGE:
        pip.append("--quiet")
    run(session, "python", *pip, *requirements, environment=environment, **variables)
    _stamp(session, name, environment).write_text(_digest(requirements), encoding="utf-8")


def _is_installed(session: nox.Session, name: str, requirements: Sequence[str], environment: str) -> bool:
    stamp = _stamp(session, name, environment)
    return stamp.exists() and stamp.read_text(encoding="utf-8") == _digest(requirements)


def _stamp(session: nox.Session, name: str, environment: str) -> Path:
    return _folder(session, environment).parent / f"installed-{name}.txt"


def _digest(requirements: Sequence[str]) -> str:
    """Return a digest of requirements and of the files that decide their versions."""
    deciders = [CONSTRAINTS]
    if "--editable" in requirements:
        deciders += [folder / "pyproject.toml" for folder in distributions()]
    digest = hashlib.sha256(repr(tuple(requirements)).encode())
    for file in deciders:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def install_group(session: nox.Session, group: str, *, environment: str = "env", **variables: str) -> None:
    """Install a dependency group of pyproject.toml, building with some variables."""
    install(session, group, *nox.project.dependency_groups(PROJECT, group), environment=environment, **variables)


def put_apart(
    session: nox.Session, requirement: str, *pip: str, name: str = "", environment: str = "peerenv", **variables: str
) -> str:
    """Install a package in a folder of its own, to be put before an environment by PYTHONPATH; return the folder."""
    folder = session.cache_dir.parent / "apart" / (name or requirement)
    if not folder.is_dir():
        options = ["--quiet", "--constraint", str(CONSTRAINTS)] if name else ["--quiet"]
        options += ["--target", str(folder), *pip]
        run(session, "python", "-m", "pip", "install", *options, requirement, environment=environment, **variables)
    return str(folder)


def install_engine(session: nox.Session, requirement: str, *, without: Sequence[str], environment: str) -> None:
    """Install what pins other versions than ours, once, and take out packages of its that do not fit this torch."""
    stamp = _folder(session, environment).parent / f"installed-{environment}.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != requirement:
        pip = ["-m", "pip", "--disable-pip-version-check"]
        run(session, "python", *pip, "install", requirement, environment=environment)
        run(session, "python", *pip, "uninstall", "--quiet", "--yes", *without, environment=environment)
        stamp.write_text(requirement, encoding="utf-8")


def ggml_build(isa: str = "", machine: str = "") -> dict[str, str]:
    """Return the variables that build ggml for this CPU, or for AVX2 alone.

    AMX is left out: systems that do not grant it end a process that touches its tiles.
    """
    if isa == "avx2":
        return {"CMAKE_ARGS": "-DGGML_NATIVE=OFF"}
    found = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    if os.name == "posix" and (machine or platform.machine()) == "x86_64":
        found |= dict.fromkeys(("CFLAGS", "CXXFLAGS"), "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16")
    return found


def make_environment(session: nox.Session) -> None:
    """Make ``env`` as nox does where there is none, with CPU kernels for the best instruction set of this machine.

    The session ``env`` compiles the others.
    """
    folder = _folder(session, "env")
    if not folder.is_dir():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(folder.parent), external=True)
    install_packages(session, isas="native")


def install_packages(session: nox.Session, *, environment: str = "env", isas: str = "all") -> None:
    """Install torch first, so that no dependency installs it, then libraries, and every package here, editable.

    Args:
        session: The session that runs.
        environment: Where to install.
        isas: The instruction sets for which cpu-native is compiled, ``all`` or ``native``; where all were compiled
            before, that stays.
    """
    install(session, "torch", "torch", "numpy", environment=environment)
    install(session, "builders", *BUILDERS, environment=environment)
    folders: Sequence[Path] = distributions()
    if "CXX" not in os.environ and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        session.warn("there is no C++ compiler here: cpu-native is left out, and the reference runs instead")
        folders = [folder for folder in folders if folder.name != "cpu-native"]
    for folder in (item for item in folders if item.name in COMPILED):
        own = ["--no-deps", "--no-build-isolation", "--editable", str(folder)]
        is_kernels = folder.name == "cpu-native"
        if is_kernels and isas != "all" and not _is_installed(session, folder.name, own, environment):
            own += ["--config-settings", f"cmake.define.Q4_CPU_ISAS={isas}"]
        if not _is_installed(session, folder.name, own, environment):
            cores = "one core" if isas == "native" else "two idle cores"
            session.log(f"{folder.name}: compiling{f', which takes two minutes on {cores}' if is_kernels else ''}")
        install(session, folder.name, *own, environment=environment)
    needed = {line for folder in folders if folder.name not in PEER_PACKAGES for line in _libraries(folder)}
    install(session, "libraries", *sorted(needed), environment=environment)
    editables = [item for folder in folders if folder.name not in COMPILED for item in ("--editable", str(folder))]
    # Their libraries are there, but for those of PEER_PACKAGES, of which pip would write as of an error.
    install(session, "packages", "--no-deps", "--no-build-isolation", *editables, environment=environment)


def _libraries(folder: Path) -> list[str]:
    """Return what a distribution always needs of others."""
    return [line for line in Project(folder).requirements[""] if not re.match(r"q4(core|-)", line)]


def link(session: nox.Session, environment: str, *, base: str = "env") -> None:
    """Make the packages of one environment importable in another, after its own: torch is installed once."""
    script = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    programs = [str(_folder(session, name) / "python") for name in (environment, base)]
    own, other = (session.run(program, "-c", script, external=True, silent=True) for program in programs)
    Path(str(own), "_base.pth").write_text(f"import site; site.addsitedir({str(other)!r})\n", encoding="utf-8")


def _folder(session: nox.Session, environment: str) -> Path:
    """Return where the programs of an environment are, from the root on: some are started in other folders."""
    return session.cache_dir.parent.absolute() / environment / ("Scripts" if os.name == "nt" else "bin")
