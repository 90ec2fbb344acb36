"""The roofline: GFLOP/s by operations per byte, under the measured bandwidth and the measured dense products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.cpu.style import COLORS, bandwidth, caption, find, plt, save, tidy

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw"]

_LINES = {
    "q4core Q4_0, int8": ("q4_0 int8", "ours int8", "o-"),
    "q4core NVFP4, int8": ("nvfp4 int8", "ours int8", "D--"),
    "q4core NF4, exact": ("nf4 exact", "ours exact", "o-"),
    "ggml Q4_0 (repacked)": ("ggml Q4_0 repack", "ggml", "s-"),
    "ggml Q4_K (repacked)": ("ggml Q4_K repack", "ggml", "s--"),
    "ggml NVFP4": ("ggml NVFP4", "ggml", "s:"),
    "ONNX Runtime int4": ("onnxruntime int4 g32", "onnxruntime", "s-"),
    "torch fp32": ("torch fp32", "torch", "^-"),
    "bitsandbytes NF4, fp32": ("bitsandbytes NF4 fp32", "bitsandbytes", "v-"),
}
_FLOAT = 4


def _intensity(stage: dict[str, Any], call: dict[str, Any]) -> float:
    """Return operations per byte of weight, x and y."""
    outputs, inputs = stage["shape"]
    moved = call["weight_bytes"] + _FLOAT * stage["rows"] * (outputs + inputs)
    operations = 2.0 * stage["rows"] * outputs * inputs
    return float(operations / moved)


def _roofs(axes: Axes, stages: list[dict[str, Any]], span: tuple[float, float]) -> None:
    """Draw each ceiling up to where the bandwidth meets it."""
    calls = [call for stage in stages for call in stage["calls"].values()]
    limit = max((value for stage in stages if (value := bandwidth(stage)) is not None), default=None)
    for precision, line in (("fp32", "--"), ("int8", "-")):
        rates = [call["gflop_per_s"] for call in calls if call["format"] == "matmul" and call["precision"] == precision]
        if rates:
            knee = span[0] if limit is None else max(rates) / limit
            axes.plot([knee, span[1]], [max(rates)] * 2, color="black", linewidth=1.2, linestyle=line)
            axes.text(
                span[1],
                max(rates) * 1.04,
                f"torch {precision} matmul, {max(rates):.0f} GFLOP/s",
                fontsize=8,
                ha="right",
            )
    if limit is not None:
        peak = max((call["gflop_per_s"] for call in calls), default=limit * span[0])
        x = np.array([span[0], peak / limit])
        axes.plot(x, x * limit, color="black", linewidth=1.2)
        place = (span[0] * 1.3, span[0] * 1.3 * limit * 1.1)
        words = f"read bandwidth, {limit:.0f} GB/s"
        axes.text(*place, words, fontsize=8, rotation=_diagonal(axes, span), rotation_mode="anchor")


def _diagonal(axes: Axes, span: tuple[float, float]) -> float:
    """Return the angle at which one decade of x meets one decade of y."""
    low, high = axes.get_ylim()
    size = axes.get_window_extent()
    across, up = size.width / np.log10(span[1] / span[0]), size.height / np.log10(high / low)
    return float(np.degrees(np.arctan2(up, across)))


def draw(result: dict[str, Any], path: Path) -> Path | None:
    """Draw the square shape with all threads, None where it was not measured from one row on.

    Args:
        result: What the result file holds.
        path: Where the picture goes.
    """
    measured = [stage for stage in result["stages"] if stage["weights_from"] == "memory"]
    if not measured:
        return None
    threads, shape = max(stage["threads"] for stage in measured), measured[0]["shape"]
    stages = sorted(find(result, threads=threads, shape=shape, weights_from="memory"), key=lambda stage: stage["rows"])
    figure, axes = plt.subplots(figsize=(8.4, 6), layout="constrained")
    for words, (name, shade, line) in _LINES.items():
        points = [
            (_intensity(stage, call), call["gflop_per_s"]) for stage in stages if (call := stage["calls"].get(name))
        ]
        if points:
            axes.plot(*zip(*points, strict=True), line, color=COLORS[shade], markersize=5, label=words)
    axes.set(
        xscale="log", yscale="log", xlabel="operations per byte (weight, x and y)", ylabel="GFLOP/s (more is better)"
    )
    span = axes.get_xlim()
    drawn = {name for name, _, _ in _LINES.values()}
    rates = [
        call["gflop_per_s"]
        for stage in stages
        for name, call in stage["calls"].items()
        if name in drawn or call["format"] == "matmul"
    ]
    axes.set_ylim(min(rates, default=1) / 3, max(rates, default=10) * 1.8)
    figure.canvas.draw()  # lays the axes out, which the angle of the text needs
    _roofs(axes, stages, span)
    axes.set_xlim(span)
    axes.grid(color="#e4e4e4")
    tidy(axes)
    rows = ", ".join(str(stage["rows"]) for stage in stages)
    axes.set_title(f"{shape[0]} × {shape[1]}, {threads} threads, points: {rows} rows", loc="left")
    axes.legend(loc="lower right", ncols=2, frameon=False)
    figure.suptitle(caption(result), fontsize=8, color="#555555")
    return save(figure, path)
