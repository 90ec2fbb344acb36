"""Lines of prefill: GFLOP/s by rows of x, ours as a band over the formats, each library's best for comparison."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.cpu.style import COLORS, caption, find, is_wide, plt, save, tidy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw"]

_PEERS = {
    "ggml, its best 4-bit type": ("ggml", "ggml", "-"),
    "ONNX Runtime MatMulNBits int4": ("onnxruntime", "onnxruntime", "-"),
    "bitsandbytes NF4": ("bitsandbytes", "bitsandbytes", "-"),
}


def _ours(precision: str) -> Callable[[dict[str, Any]], bool]:
    return lambda call: call["role"] == "ours" and call["precision"] == precision and not is_wide(call)


def _theirs(library: str) -> Callable[[dict[str, Any]], bool]:
    return lambda call: call["library"] == library and not is_wide(call)


def _rates(stage: dict[str, Any], fits: Callable[[dict[str, Any]], bool]) -> list[float]:
    return [call["gflop_per_s"] for call in stage["calls"].values() if fits(call)]


def _panel(axes: Axes, stages: list[dict[str, Any]]) -> None:
    rows = [stage["rows"] for stage in stages]
    for precision, words in (
        ("int8", "q4core, int8 activations (slowest, median, fastest 4-bit format)"),
        ("int16", "q4core, int16 activations (the same)"),
        ("exact", "q4core, exact (the same)"),
    ):
        rates = [_rates(stage, _ours(precision)) for stage in stages]
        if all(rates):
            shade = COLORS[f"ours {precision}"]
            axes.fill_between(
                rows, [min(own) for own in rates], [max(own) for own in rates], color=shade, alpha=0.25, linewidth=0
            )
            axes.plot(
                rows, [statistics.median(own) for own in rates], color=shade, marker="o", linewidth=2, label=words
            )
    for words, (library, shade, line) in _PEERS.items():
        best = [max(_rates(stage, _theirs(library)), default=None) for stage in stages]
        if None not in best:
            axes.plot(rows, best, line, color=COLORS[shade], marker="s", markersize=4, label=words)  # type: ignore[arg-type]  # no None
    for name, line in (("torch fp32", "-"), ("torch bf16", "--"), ("torch int4pack bf16", ":")):
        own = [stage["calls"].get(name, {}).get("gflop_per_s") for stage in stages]
        if None not in own:
            axes.plot(rows, own, line, color=COLORS["torch"], marker="^", markersize=4, label=name)
    axes.set(xlabel="rows of x", xscale="log")
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd")
    tidy(axes)


def draw(result: dict[str, Any], path: Path) -> Path | None:
    """Draw one panel for each number of threads, None where no prefill was measured.

    Args:
        result: What the result file holds.
        path: Where the picture goes.
    """
    measured = [stage for stage in result["stages"] if stage["rows"] > 1]
    counts = sorted({stage["threads"] for stage in measured}, reverse=True)
    if not counts:
        return None
    figure, panels = plt.subplots(1, len(counts), figsize=(5.4 * len(counts), 5), layout="constrained", squeeze=False)
    for axes, threads in zip(panels[0], counts, strict=True):
        stages = sorted(
            (stage for stage in find(result, threads=threads) if stage["rows"] > 1), key=lambda stage: stage["rows"]
        )
        _panel(axes, stages)
        shape = stages[0]["shape"]
        words = "one thread" if threads == 1 else f"{threads} threads"
        axes.set_title(f"Prefill, {shape[0]} × {shape[1]}, {words}", loc="left")
    panels[0][0].set_ylabel("GFLOP/s (more is better)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(caption(result), fontsize=8, color="#555555")
    return save(figure, path)
