"""Bars of decode: GB/s of weights and the read bandwidth of the same run; the file holds every format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from benchmarks.cpu.style import COLORS, bandwidth, caption, color, find, is_wide, plt, save, tidy

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw"]

_ORDER = ("ours int8", "ours int16", "ours exact", "ggml", "onnxruntime", "torch", "bitsandbytes", "torchao")
_TITLES = {
    "ours int8": "q4core, int8 activations",
    "ours int16": "q4core, int16 activations",
    "ours exact": "q4core, exact",
    "onnxruntime": "ONNX Runtime",
}
_OURS = {"nf4 int8", "nvfp4 int8", "q4_0 int8", "nf4 int16", "nf4 exact"}
_DENSE = "torch bf16"
_GAP = 0.9
_BAR_INCHES = 0.185


def _group(call: dict[str, Any]) -> str:
    return f"ours {call['precision']}" if call["role"] == "ours" else str(call["library"])


def _label(name: str, call: dict[str, Any]) -> str:
    if call["role"] == "ours":
        family, *choice = call["format"].split()
        return " ".join([family.upper(), *choice])
    return name.removeprefix(f"{call['library']} ").replace("repack", "(repacked)")


def _groups(stage: dict[str, Any]) -> list[list[tuple[str, dict[str, Any]]]]:
    """Return the bars by library: five of ours, each other library's fastest 4-bit one, dense bf16."""
    calls = {name: call for name, call in stage["calls"].items() if call["role"] != "yardstick"}
    fastest: dict[str, str] = {}
    for name in sorted(calls, key=lambda item: float(calls[item]["median"])):
        if calls[name]["role"] != "ours" and not is_wide(calls[name]):
            fastest.setdefault(calls[name]["library"], name)
    shown = [(name, call) for name, call in calls.items() if name in {*_OURS, _DENSE, *fastest.values()}]
    return [own for key in _ORDER if (own := [item for item in shown if _group(item[1]) == key])]


def _time(us: float) -> str:
    return f"{us:,.0f} µs" if us < 1e4 else f"{us / 1e3:,.0f} ms"  # noqa: PLR2004  # five digits are too many


def _bars(axes: Axes, stage: dict[str, Any]) -> None:
    place, ticks, labels = 0.0, [], []
    limit = bandwidth(stage)
    widest = max([limit or 0, *(call["gb_per_s"] for own in _groups(stage) for _, call in own)])
    for own in _groups(stage):
        for name, call in own:
            axes.barh(place, call["gb_per_s"], height=0.8, color=color(call))
            ends = [call["weight_bytes"] / call[key] / 1e3 for key in ("p90", "p10")]
            axes.plot(ends, [place, place], color="#00000088", linewidth=1)
            is_long = call["gb_per_s"] > widest / 5
            where, shade = (widest / 80, "white") if is_long else (max(call["gb_per_s"], *ends) + widest / 80, "black")
            axes.text(where, place, _time(call["median"]), va="center", fontsize=7.5, color=shade)
            ticks.append(place)
            labels.append(_label(name, call))
            place += 1
        place += _GAP
    if limit is not None:
        axes.axvline(limit, color=COLORS["read"], linewidth=1.2)
        axes.text(limit - widest / 80, -1.1, f"read bandwidth {limit:.1f} GB/s", ha="right", fontsize=8)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_xlim(0, widest * 1.12)
    axes.set_ylim(place - _GAP, -1.7)
    axes.set(xlabel="GB/s of weights (more is better)")
    tidy(axes)


def draw(result: dict[str, Any], threads: int, path: Path) -> Path | None:
    """Draw one panel for each shape, None where nothing was measured with that number of threads.

    Args:
        result: What the result file holds.
        threads: Of the stages to draw.
        path: Where the picture goes.
    """
    stages = find(result, rows=1, threads=threads, weights_from="memory")
    if not stages:
        return None
    count = max(sum(map(len, _groups(stage))) + len(_groups(stage)) for stage in stages)
    size = (5.2 * len(stages), 1.9 + _BAR_INCHES * count)
    figure, panels = plt.subplots(1, len(stages), figsize=size, layout="constrained", squeeze=False)
    for axes, stage in zip(panels[0], stages, strict=True):
        _bars(axes, stage)
        axes.set_title(f"{stage['shape'][0]} × {stage['shape'][1]}", loc="left")
    words = "one thread" if threads == 1 else f"{threads} threads"
    handles = [Patch(color=COLORS[key]) for key in _ORDER]
    figure.legend(
        handles, [_TITLES.get(key, key) for key in _ORDER], loc="outside lower center", ncols=len(_ORDER), frameon=False
    )
    title = f"Decode (one row), {words}: weights read from memory; times of one product, 10th to 90th percentile"
    chosen = "Of each other library its fastest 4-bit format, and torch's dense bf16"
    figure.suptitle(f"{title}\n{chosen}; {caption(result)}", fontsize=10, color="#333333")
    return save(figure, path)
