"""Printed report of a run: a table for each stage, and the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import verdict
from benchmarks.cpu.verdicts import best_peer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


__all__ = ["lines"]


def lines(result: dict[str, Any], verdicts: Sequence[verdict.Verdict]) -> Iterator[str]:
    """Return the lines that a run prints."""
    for stage in result["stages"]:
        yield f"\n{stage['name']}"
        for name, call in sorted(stage["calls"].items(), key=lambda item: item[1]["median"]):
            spread = f"({call['p10']:,.0f} … {call['p90']:,.0f})"
            rates = f"{call['gb_per_s']:6.1f} GB/s {call['gflop_per_s']:7.0f} GFLOP/s"
            yield f"  {name:<28} {call['median']:12,.1f} µs {spread:<24} {rates}"
    for stage in result.get("type_stages", ()):
        yield from _type_lines(stage)
    for layer in result["small_layers"]:
        calls = ", ".join(f"{name} {call['median']:.1f}" for name, call in layer["calls"].items())
        yield f"{layer['name']}: {calls} µs"
    if result["peak_resident_bytes"] is not None:
        yield f"peak memory: {result['peak_resident_bytes'] / 1e9:.1f} GB"
    for name, peer in result["peers"].items():
        yield f"{name}: {peer['version'] if peer['installed'] else peer['why']}"
    yield from verdict.lines(verdicts)


def _type_lines(stage: dict[str, Any]) -> Iterator[str]:
    """Return one line for each type: what ours takes in each precision, the best peer, and which of them is ahead."""
    calls = stage["calls"]
    yield f"\n{stage['group']}, {stage['name']}; µs"
    yield f"  {'type':<20} {'exact':>9} {'int16':>9} {'int8':>9} {'best peer':>9}"
    for format_ in dict.fromkeys(call["format"] for call in calls.values() if call["role"] == "ours"):
        own = [calls.get(f"{format_} {precision}") for precision in ("exact", "int16", "int8")]
        if None in own:
            continue
        times = " ".join(f"{call['median']:9,.0f}" for call in own if call is not None)
        name, ratio = best_peer(stage, format_)
        best = "        –" if ratio is None else f"{calls[name]['median']:9,.0f} {ratio:5.2f}"
        word = "" if ratio is None else f" {'ahead' if ratio >= 1 else 'behind'} ({name})"
        yield f"  {format_:<20} {times} {best}{word}"
