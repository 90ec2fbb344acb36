"""Printed report of a run: a table for each stage, and the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import verdict

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
    for layer in result["small_layers"]:
        calls = ", ".join(f"{name} {call['median']:.1f}" for name, call in layer["calls"].items())
        yield f"{layer['name']}: {calls} µs"
    if result["peak_resident_bytes"] is not None:
        yield f"peak memory: {result['peak_resident_bytes'] / 1e9:.1f} GB"
    for name, peer in result["peers"].items():
        yield f"{name}: {peer['version'] if peer['installed'] else peer['why']}"
    yield from verdict.lines(verdicts)
