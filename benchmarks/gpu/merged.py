"""Merge of result files of one device: the stages of several commands, each with the yardsticks of its own run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DeviceMismatchError", "merge", "slug_of"]


class DeviceMismatchError(ValueError):
    """Results of two devices can't be one result."""


def slug_of(result: dict[str, Any]) -> str:
    """Return the device's name as a part of file names."""
    return re.sub(r"[^a-z0-9]+", "-", result["device"]["name"].lower()).strip("-")


def merge(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one result with the stages of all; of a stage that several have, the last one counts.

    Raises:
        DeviceMismatchError: The results are not of one device.
    """
    names = {(result["device"]["name"], result["device"]["architecture"]) for result in results}
    if len(names) != 1:
        raise DeviceMismatchError(f"results must be of one device, got {sorted(names)}")
    runs: dict[str, Any] = {}
    stages: dict[str, Any] = {}
    for result in results:
        runs |= result["runs"]
        stages |= result["stages"]
    used = {stage["run"] for stage in stages.values()}
    latest = results[-1]
    return {
        "device": latest["device"],
        "is_tiny": any(result["is_tiny"] for result in results),
        "backends": latest["backends"],
        "runs": {name: run for name, run in runs.items() if name in used},
        "stages": stages,
    }
