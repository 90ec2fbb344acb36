"""Picture of ``snn.json``: events per second of the layer and of the circuits, and bytes per synapse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from benchmarks import style
from benchmarks.style import plt

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw"]

COLOURS = {
    "q4-snn": "#1b7837", "snnTorch": "#ef8a62", "Norse": "#b2182b", "SpikingJelly": "#7b3294", "Brian2": "#4393c3",
    "NEST": "#053061", "SpikingJelly, all steps in one product": "#c2a5cf",
}  # fmt: skip


def _bars(axes: Axes, groups: Mapping[str, Mapping[str, float]], title: str, label: str) -> None:
    """Draw groups of bars, one colour for each simulator, on a logarithmic scale."""
    names = [name for name in COLOURS if any(name in values for values in groups.values())]
    width = 0.85 / len(names)
    for index, name in enumerate(names):
        places = [(at, values[name]) for at, values in enumerate(groups.values()) if name in values]
        middle = (index - (len(names) - 1) / 2) * width
        axes.bar([at + middle for at, _ in places], [value for _, value in places], width, color=COLOURS[name])
    axes.set(yscale="log", title=title, ylabel=label, xticks=range(len(groups)), xticklabels=list(groups))
    style.tidy(axes)
    axes.grid(axis="y", alpha=0.3)


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Draw a result, with the facts of its ``environment``, into a PNG, and return where it is."""
    figure, (speed, circuits, memory) = plt.subplots(
        1, 3, figsize=(13, 4.6), layout="constrained", width_ratios=[2.2, 1, 1.4]
    )
    layer, measured = result["layer"], result["circuits"]
    events: dict[str, dict[str, float]] = {}
    for row in layer["rows"]:
        events.setdefault(f"{row['rate']:.0%} of inputs", {})[row["who"]] = row["synaptic_events_per_s"]
    _bars(speed, events, f"Layer of {result['size']} × {result['size']} synapses", "synaptic events/s")
    runs = {f"{item['neurons']} neurons": item["runs"] for item in measured}
    events = {at: {who: run["synaptic_events_per_s"] for who, run in found.items()} for at, found in runs.items()}
    _bars(circuits, events, "Recurrent circuit", "synaptic events/s")
    held = {at: {who: run["bytes_per_synapse"] for who, run in found.items()} for at, found in runs.items()}
    _bars(memory, {"layer": layer["bytes_per_synapse"], **held}, "Memory", "bytes per synapse")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.suptitle(f"Spiking networks: {style.caption(result, 'one thread')}", fontsize=10)
    return style.save(figure, path)
