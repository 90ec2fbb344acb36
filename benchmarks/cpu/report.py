"""What a run prints: a table for each stage, and the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.cpu.verdicts import Verdict

__all__ = ["lines"]


def lines(result: dict[str, Any], verdicts: Sequence[Verdict]) -> Iterator[str]:
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
    for name, peer in result["peers"].items():
        yield f"{name}: {peer['version'] if peer['installed'] else peer['why']}"
    yield from _verdict_lines(verdicts)


def _verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Return one line for each target, with its worst case, and one for each subject that misses it."""
    yield "\ntarget: how many meet it, and the worst"
    for target in dict.fromkeys(verdict.target for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.target == target]
        measured = [verdict for verdict in own if verdict.ratio is not None]
        if not measured:
            yield f"  not measured     {target}"
            continue
        worst = min(measured, key=lambda verdict: verdict.margin)
        met = sum(bool(verdict.is_met) for verdict in measured)
        word = "met" if met == len(measured) else "MISSED"
        yield f"  {word:<7} {met:3}/{len(measured):<3}  {target}: worst {worst.ratio:.3g} ({worst.subject}; {worst.against})"
        for verdict in sorted(measured, key=lambda item: item.margin):
            if not verdict.is_met:
                yield f"      MISSED {verdict.ratio:8.3g}  {verdict.subject}  against {verdict.against}"
