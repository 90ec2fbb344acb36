"""Pictures of a result: the share of the copy bandwidth that gemv reaches, and gemm compared with cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.gpu.dense import NAME as DENSE
from benchmarks.style import plt, save, tidy

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["draw_gemm", "draw_gemv"]

_COLORS = {
    "nf4": "#0b6e4f",
    "fp4": "#4fae87",
    "nvfp4": "#3b6fb6",
    "mxfp4": "#7fa6d9",
    "q4_0": "#d1731f",
    "q4_1": "#e8ab6f",
    "int4 g32": "#8a4fa3",
    "int4 g128": "#c25b8a",
}
_DENSE_COLOR = "#8c8c8c"


def _caption(result: dict[str, Any], stage: dict[str, Any]) -> str:
    facts, device = result["runs"][stage["run"]]["environment"], result["device"]
    return f"{device['name']} ({device['architecture']}), {facts['date'][:10]}, {facts['commit']}"


def _is_chosen(name: str, call: dict[str, Any]) -> bool:
    return call["role"] == "ours" and call["precision"] == "exact" and ", path " not in name


def _rate(table: dict[str, Any], format_: str) -> float | None:
    calls = (call for name, call in table["calls"].items() if _is_chosen(name, call))
    return next((call["gb_per_s"] for call in calls if call["format"] == format_), None)


def draw_gemv(result: dict[str, Any], path: Path) -> Path | None:
    """Draw one group of bars for each shape: GB/s of weights over the copy bandwidth; None without such results.

    Args:
        result: What the result file holds.
        path: Where the picture goes.
    """
    stage = result["stages"].get("gemv", {})
    tables = [table for table in stage.get("tables", ()) if table["rows"] == 1]
    limits = result["runs"][stage["run"]]["limits"] if tables else None
    if limits is None:
        return None
    figure, axes = plt.subplots(figsize=(10, 4.4), layout="constrained")
    width = 0.8 / len(_COLORS)
    for index, (format_, shade) in enumerate(_COLORS.items()):
        shares = [_rate(table, format_) for table in tables]
        places = [at + (index - len(_COLORS) / 2) * width for at, share in enumerate(shares) if share is not None]
        heights = [share / limits["copy_gb_per_s"] for share in shares if share is not None]
        if heights:
            axes.bar(places, heights, width, color=shade, label=format_)
    axes.axhline(0.8, color="#cc0000", linewidth=1, linestyle="--", label="target for 32 MB and more")
    axes.set_xticks(range(len(tables)), [f"{table['shape'][0]}×{table['shape'][1]}" for table in tables])
    axes.set(ylabel="weights read, over the copy bandwidth (more is better)")
    axes.set_title(f"One row of x; copy {limits['copy_gb_per_s']:,.0f} GB/s (read + written)", loc="left")
    tidy(axes)
    figure.legend(loc="outside lower center", ncols=9, frameon=False)
    figure.suptitle(_caption(result, stage), fontsize=8, color="#555555")
    return save(figure, path)


def draw_gemm(result: dict[str, Any], path: Path) -> Path | None:
    """Draw one panel for each shape: TFLOP/s by rows of x, paths that were measured alone as thin lines; None without.

    Args:
        result: What the result file holds.
        path: Where the picture goes.
    """
    stage = result["stages"].get("gemm", {})
    shapes = list(dict.fromkeys(tuple(table["shape"]) for table in stage.get("tables", ())))
    if not shapes:
        return None
    figure, panels = plt.subplots(1, len(shapes), figsize=(4.8 * len(shapes), 4.6), layout="constrained", squeeze=False)
    for axes, shape in zip(panels[0], shapes, strict=True):
        tables = [table for table in stage["tables"] if tuple(table["shape"]) == shape]
        lines: dict[str, list[tuple[int, float, dict[str, Any]]]] = {}
        for table in tables:
            for name, call in table["calls"].items():
                lines.setdefault(name, []).append((table["rows"], call["tflop_per_s"], call))
        for name, points in lines.items():
            alone = ", path " in name
            shade = _DENSE_COLOR if name == DENSE else _COLORS.get(points[0][2]["format"], "#222222")
            style = {"linewidth": 0.8, "linestyle": ":"} if alone else {"linewidth": 2, "marker": "o", "markersize": 4}
            label = None if alone else name
            axes.plot([m for m, _, _ in points], [rate for _, rate, _ in points], color=shade, label=label, **style)
        axes.set(xscale="log", yscale="log", xlabel="rows of x")
        axes.set_title(f"{shape[0]} × {shape[1]}", loc="left")
        axes.grid(color="#e4e4e4")
        tidy(axes)
    panels[0][0].set_ylabel("TFLOP/s, more is better (dotted: one path alone)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.suptitle(_caption(result, stage), fontsize=8, color="#555555")
    return save(figure, path)
