"""Makes environments into which wheels are installed, as an index would serve them, and nothing of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["install", "make_environment", "run", "site_packages"]

ROOT = Path(__file__).parents[2]


def site_packages(base: Path) -> Path:
    """Return where an environment keeps its packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(base)}))


def _wheel(folder: Path, target: Path) -> Path:
    """Build the wheel of a distribution."""
    target.mkdir(parents=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


def install(base: Path, folder: Path) -> None:
    """Build a distribution and unpack its wheel into an environment."""
    with zipfile.ZipFile(_wheel(folder, base / "wheels" / folder.name)) as wheel:
        wheel.extractall(site_packages(base))


def make_environment(base: Path, folders: Iterable[Path]) -> Path:
    """Return the python of a new environment with torch and the like, these distributions, and no other of ours."""
    venv.create(base, with_pip=False, symlinks=True)
    site = site_packages(base)
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        ours = item.name.lower().lstrip("_").startswith(("q4", "pytest_q4", "editable"))
        if not ours and item.suffix != ".pth" and not (site / item.name).exists():
            (site / item.name).symlink_to(item)
    for folder in folders:
        install(base, folder)
    return base / "bin" / "python"


def run(python: Path, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment in a folder, without the variables that would bring this checkout back."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "Q4_", "COV_", "PYTEST_"))}
    command = [str(python), *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, timeout=scaled(300), check=False
    )
