"""Common style of the pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["caption", "plt", "save", "tidy"]

plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "figure.titlesize": 12})


def caption(result: Mapping[str, Any], *more: str) -> str:
    """Return the line that says where, how and when a result was measured."""
    facts = result["environment"]
    machine = facts["machine"]["processor"] or facts["machine"]["machine"]
    parts = (machine, f"{facts['machine']['cpu_count']} cores", *more, facts["date"][:10], facts["commit"])
    return ", ".join(parts)


def tidy(axes: Axes) -> None:
    """Remove the frame lines without a scale."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> Path:
    """Write a picture, and close the figure."""
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
