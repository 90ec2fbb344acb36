"""Printed report of a run: a table for each stage, what was refused or left out, and the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["lines"]


def _limits(limits: dict[str, Any]) -> Iterator[str]:
    empty = "not measured" if limits["empty_us"] is None else f"{limits['empty_us']:.2f} µs"
    yield f"copy {limits['copy_gb_per_s']:,.1f} GB/s (read + written), empty kernel {empty}"
    yield f"bf16 product {limits['bf16_tflop_per_s']:,.1f} TFLOP/s"


def _table(table: dict[str, Any]) -> Iterator[str]:
    yield f"\n{table['name']}"
    for name, call in sorted(table["calls"].items(), key=lambda item: float(item[1]["median"])):
        spread = f"({call['p10']:,.1f} … {call['p90']:,.1f})"
        rates = f"{call['gb_per_s']:8.1f} GB/s {call['tflop_per_s']:8.2f} TFLOP/s"
        yield f"  {name:<44} {call['median']:12,.2f} µs {spread:<24} {rates}"
    for name, why in table["does_not_run"].items():
        yield f"  {name:<44} does not run: {why[:160]}"


def _cases(stage: dict[str, Any]) -> Iterator[str]:
    for name, report in stage["reports"].items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in report["counts"].items())
        left = f", {report['not_run']} not run" if report["not_run"] else ""
        word = "passed" if report["passed"] else "NOT PASSED"
        yield f"{name}: {word}, {report['cases']} cases: {counts}{left} ({report['seconds']:.0f} s)"
        for failure in report["failures"][:5]:
            yield f"  {failure['outcome']:<8} {failure['case']}: {failure['message'][:200]}"


def _times(stage: dict[str, Any]) -> Iterator[str]:
    for label, call in stage.get("calls", {}).items():
        yield f"  {label:<44} {call['median']:12,.1f} µs {call['gb_per_s']:8.1f} GB/s"
    for layer in stage.get("layers", ()):
        calls = ", ".join(f"{key} {call['median']:.1f}" for key, call in layer["calls"].items())
        yield f"  {layer['name']}: {calls} µs"
    for run, values in stage.get("runs", {}).items():
        for format_, layer in values.get("layers", {}).items():
            text = layer.get("refused") or f"prepare {layer['prepare_ms']:.0f} ms, probes {layer['probe_ms']:.0f} ms"
            yield f"  {run}, {format_}: {text}"
        if "error" in values:
            yield f"  {run}: {values['error'].splitlines()[-1]}"


def _stage(name: str, stage: dict[str, Any]) -> Iterator[str]:
    yield f"\n== {name}, {stage['seconds']:.0f} s"
    if "error" in stage:
        yield f"  ended by {stage['error']}"
    if "reports" in stage:
        yield from _cases(stage)
    for table in stage.get("tables", ()):
        yield from _table(table)
    yield from _times(stage)
    for folder, done in stage.get("folders", {}).items():
        yield f"  {folder}: {'passed' if done['passed'] else 'FAILED'}: {done['output'].splitlines()[-1:]}"
    for label, why in stage.get("refused", {}).items():
        yield f"  refused: {label}: {' '.join(why.split())[:400]}"
    if stage.get("left_out"):
        yield f"  no time was left for: {', '.join(stage['left_out'])}"


def lines(result: dict[str, Any], verdicts: Sequence[verdict.Verdict]) -> Iterator[str]:
    """Return the lines that a run prints."""
    device = result["device"]
    yield f"{device['name']} ({device['architecture']}), versions {device['versions']}"
    if result["is_tiny"]:
        yield "a tiny or interpreted run: it checks the plumbing, and its numbers mean nothing"
    for run in result["runs"].values():
        if run["limits"] is not None:
            yield from _limits(run["limits"])
    for name, stage in result["stages"].items():
        yield from _stage(name, stage)
    yield from verdict.lines(verdicts)
