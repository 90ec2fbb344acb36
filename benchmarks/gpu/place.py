"""``Place``: the GPU that is measured, or the CPU under Triton's interpreter, where the plumbing alone is checked."""

from __future__ import annotations

import importlib.metadata
import os
import re
from typing import Any

import attrs
import torch

from q4_triton_kernels.target import driver_version

__all__ = ["NoPlaceError", "Place", "find_place", "versions"]

_PACKAGES = ("torch", "triton", "cupy-cuda13x", "numpy")
_USUAL_CACHE_BYTES = 64 << 20
_INTERPRETED_CACHE_BYTES = 1
"""One copy of a weight is enough where no number counts."""


class NoPlaceError(RuntimeError):
    """There is neither a CUDA device nor an interpreter to run on."""


@attrs.frozen
class Place:
    """Where a run takes place.

    Args:
        device: Of torch.
        name: What the device calls itself.
        architecture: ``sm_90`` and the like; ``interpreted`` for the CPU under Triton's interpreter.
        memory_bytes: How much memory it has; 0 where that does not matter.
        cache_bytes: Size of its last-level cache, which copies of a weight must exceed.
        processors: How many multiprocessors it has.
        driver: Version of the driver's CUDA, such as 13000; 0 without one.
    """

    device: torch.device
    name: str
    architecture: str
    memory_bytes: int = 0
    cache_bytes: int = _INTERPRETED_CACHE_BYTES
    processors: int = 1
    driver: int = 0

    @property
    def is_cuda(self) -> bool:
        """Whether this is hardware."""
        return self.device.type == "cuda"

    @property
    def slug(self) -> str:
        """The name as a part of file names."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def rotation_bytes(self) -> int:
        """How many bytes the copies of a weight take at least, so that weights come from memory."""
        return 3 * self.cache_bytes

    def to_json(self) -> dict[str, Any]:
        """Return what the result file stores."""
        return attrs.asdict(self) | {"device": str(self.device), "versions": versions()}


def versions() -> dict[str, str | None]:
    """Return the version of each package that a number depends on; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def find_place(index: int = 0) -> Place:
    """Return the CUDA device of that index, or the CPU where ``TRITON_INTERPRET=1`` is set.

    Raises:
        NoPlaceError: There is neither.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Place(torch.device("cpu"), "interpreter", "interpreted")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise NoPlaceError(
            f"device must be a CUDA device, torch sees {count} of them. "
            "TRITON_INTERPRET=1 with --tiny tries the plumbing on the CPU; --dry-run shows what would run."
        )
    facts: Any = torch.cuda.get_device_properties(index)
    return Place(
        device=torch.device("cuda", index),
        name=facts.name,
        architecture=f"sm_{facts.major}{facts.minor}",
        memory_bytes=facts.total_memory,
        cache_bytes=getattr(facts, "L2_cache_size", _USUAL_CACHE_BYTES),
        processors=facts.multi_processor_count,
        driver=driver_version() or 0,
    )
