"""Distributions of this repository, as their ``pyproject.toml`` describes them; no package is imported."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["BUILDERS", "CONSTRAINTS", "EXAMPLE", "ROOT", "Project", "distributions", "projects"]

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
BUILDERS = ["cmake", "hatchling", "nanobind", "ninja", "scikit-build-core"]
"""What builds the packages of this repository."""
EXAMPLE = ROOT / "examples/q4-example-backend"
"""What authors of plugins copy: a distribution that is installed in tests, and not published."""
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


class Project:
    """A distribution.

    Args:
        folder: The folder of its ``pyproject.toml``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.toml: dict[str, Any] = _toml.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        self.table: dict[str, Any] = self.toml["project"]
        self.name: str = self.table["name"]
        self.version: str = self.table["version"]
        self.module = re.sub(r"[-.]+", "_", self.name)

    @property
    def native(self) -> bool:
        """Whether a compiler builds part of it."""
        return bool(self.toml["build-system"]["build-backend"] == "scikit_build_core.build")

    @property
    def paths(self) -> list[str]:
        """Its parts within its folder, where there are others' next to them; empty where all is its own."""
        hatch = self.toml["tool"].get("hatch", {}).get("build", {})
        return list(hatch.get("targets", {}).get("sdist", {}).get("only-include", []))

    @cached_property
    def requirements(self) -> dict[str, list[str]]:
        """Extra → its requirements, as they are written; those that are always needed under an empty name."""
        return {"": self.table.get("dependencies", []), **self.table.get("optional-dependencies", {})}


def distributions() -> list[Path]:
    """Return the folder of every distribution that is published, the core first."""
    places = ("plugins/*", "conformance", "conformance/faults")
    rest = (file.parent for place in places for file in ROOT.glob(f"{place}/pyproject.toml"))
    return [ROOT, *sorted(rest)]


def projects() -> list[Project]:
    """Return every distribution that is published, the core first."""
    return [Project(folder) for folder in distributions()]
