"""The picture: updates and reads per second of every way, one row for each scene."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.style import plt, save, tidy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["draw"]

OURS, OTHERS = "#0b6e4f", "#b0aca4"
PANELS = {
    "updates_per_s": "updates per second",
    "reads_per_s": "reads per second, all readers",
    "read_us": "a read, µs",
    "longest_read_us": "longest read, µs",
}


def _rounded(value: float) -> str:
    """Return a number with at least three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004  # three digits


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw medians and spread, on logarithmic axes, and next to each way how often an update copies the state."""
    scenes = result["scenes"]
    figure, grid = plt.subplots(len(scenes), 4, figsize=(14, 2.9 * len(scenes)), layout="constrained", squeeze=False)
    for line, (scene, rows) in zip(grid, scenes.items(), strict=True):
        names = list(rows)[::-1]
        for axes, (key, title) in zip(line, PANELS.items(), strict=True):
            middles = [rows[name][key]["median"] for name in names]
            least = [middle - rows[name][key]["p10"] for name, middle in zip(names, middles, strict=True)]
            most = [rows[name][key]["p90"] - middle for name, middle in zip(names, middles, strict=True)]
            colors = [OURS if name.startswith("q4core") else OTHERS for name in names]
            bars = axes.barh(
                range(len(names)), middles, xerr=(least, most), color=colors, ecolor="#00000066", height=0.7
            )
            axes.bar_label(bars, [_rounded(middle) for middle in middles], fontsize=7, padding=4)
            axes.set(xscale="log", xlim=(None, 30 * max(middles)), yticks=[])
            axes.set_title(f"{scene}\n{title}" if axes is line[0] else title, loc="left")
            tidy(axes)
        copies = [round(rows[name]["bytes_per_update"]["median"] / result["state_bytes"][scene]) for name in names]
        labels = [f"{name} ({count})" for name, count in zip(names, copies, strict=True)]
        line[0].set_yticks(range(len(names)), labels, fontsize=8)
    figure.suptitle("One writer and several readers of one state (in brackets: copies of the state per update)")
    return save(figure, path)
