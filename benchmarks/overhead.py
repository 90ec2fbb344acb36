"""Overhead of a call over the backend's own: ``Q4Linear.forward``, the registered op, and a warm selection.

The backend here does nothing, so that all that is measured is ours. Medians of interleaved samples, less the median of
the bare backend call in the same run.
"""

from __future__ import annotations

import argparse
import json
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record
from benchmarks.style import caption, plt, save, tidy
from benchmarks.verdict import CALL_TARGETS_US
from q4core.extension import LayerHandle

if TYPE_CHECKING:
    from collections.abc import Sequence


class Idle:
    """A backend that computes nothing, right only for weights of zero."""

    name = "idle"
    api_version = (2, 0)
    capabilities = q4.Capabilities(
        formats={"nf4"},
        scale_kinds={q4.ScaleKind.PLAIN},
        devices={"cpu"},
        dtypes={torch.float32},
        precisions={q4.Precision.W4A32},
    )

    def __init__(self) -> None:
        self.is_probing = True

    def check(self, request: q4.Request) -> q4.Support:
        """Offer one path."""
        del request
        path = q4.KernelPath("idle", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 20)
        return q4.Support.yes([path], native_state="idle")

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        """Take the tensors as they are."""
        del request, context
        return q4.Prepared((weight.qdata, weight.scale), q4.WeightSpec.of(weight))

    def export(self, prepared: q4.Prepared, rows: torch.Tensor | None = None) -> q4.PackedWeight:
        """Give the tensors back."""
        weight: q4.PackedWeight = prepared.meta.build(prepared.tensors)
        return weight if rows is None else weight.take_rows(rows)

    def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:  # noqa: ARG002  # the contract
        """Do nothing, once the probe has seen the zeros."""
        if self.is_probing:
            out.zero_()


def _session() -> tuple[q4.Session, q4.Registry, Idle]:
    backend = Idle()
    plugin = types.ModuleType("idle_plugin")

    @q4.hookimpl
    def q4_backends() -> list[Idle]:
        return [backend]

    plugin.q4_backends = q4_backends  # type: ignore[attr-defined]
    registry = q4.Registry([("idle", plugin)])
    return q4.Session(registry=registry), registry, backend


def measure(*, is_quick: bool = False) -> dict[str, list[float]]:
    """Return microseconds per call, by name."""
    rounds, repeats = (5, 20) if is_quick else (60, 300)
    session, registry, backend = _session()
    weight = q4.quantize(torch.zeros(576, 576), "nf4")
    layer = session.linear(weight)
    backend.is_probing = False
    x, out = torch.randn(1, 576), torch.empty(1, 576)
    prepared = LayerHandle(layer).prepared  # the bare backend call is the yardstick
    request = q4.Request.for_weight(weight)
    with torch.no_grad():
        return record.interleaved_us(
            {
                "backend alone": lambda: backend.linear(prepared, x, out, bias=None, path="idle"),
                "forward, out=": lambda: layer.forward(x, out=out),
                "forward": lambda: layer.forward(x),
                "forward through the op, out=": lambda: layer._forward(x, None, None, out),  # noqa: SLF001  # the slow path
                "forward through the op": lambda: layer._forward(x, None, None, None),  # noqa: SLF001  # the slow path
                "torch.empty": lambda: torch.empty(1, 576),
                "selection, warm": lambda: q4.select(request, registry=registry),
                "request and selection": lambda: q4.select(q4.Request.for_weight(weight), registry=registry),
            },
            rounds=rounds,
            repeats=repeats,
        )


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw measured overheads and their targets."""
    over = result["over_the_backend"]
    names = list(CALL_TARGETS_US)
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    places = range(len(names))
    axes.barh(places, [over[name] for name in names], color="#3465a4", label="measured, over the backend's own call")
    axes.scatter([CALL_TARGETS_US[name] for name in names], places, marker="|", s=400, color="#cc0000", label="target")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(xlabel="µs per call (less is better)", title="What q4core adds to a call")
    axes.legend()
    tidy(axes)
    figure.suptitle(caption(result), fontsize=8, color="#555555")
    return save(figure, path)


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``overhead.json`` and ``overhead.png``, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks overhead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, for development")
    parser.add_argument("--from", metavar="FILE", dest="file", help="draw a stored result again; measure nothing")
    options = parser.parse_args(arguments)
    if options.file is not None:
        written = Path(options.file)
        result = json.loads(written.read_text(encoding="utf-8"))
        print(f"written: {draw(result, written.with_suffix('.png'))}")
        return
    samples = measure(is_quick=options.quick)
    summaries = {name: record.summary(values) for name, values in samples.items()}
    bare = summaries["backend alone"]["median"]
    over = {name: values["median"] - bare for name, values in summaries.items()}
    facts = record.environment()
    result = {
        "environment": facts,
        "unit": "us",
        "over_the_backend": over,
        "targets": CALL_TARGETS_US,
        "calls": summaries,
    }
    written = record.write("overhead", result, folder=record.BUILD if options.quick else record.RESULTS)
    draw(result, written.with_suffix(".png"))
    for name, target in CALL_TARGETS_US.items():
        spread = f"{summaries[name]['p10'] - bare:.1f} … {summaries[name]['p90'] - bare:.1f}"
        verdict = "met" if over[name] <= target else "MISSED"
        print(f"{name:<30} {over[name]:6.2f} µs  ({spread})  target {target:4.1f}  {verdict}")
    print(f"written: {written}")


if __name__ == "__main__":
    main()
