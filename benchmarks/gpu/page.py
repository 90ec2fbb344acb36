"""``docs/gpu.md``: results by GPU, made from the result files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PAGE", "text_of", "write"]

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
_HEAD = """# What ran on GPUs

This page is made from `benchmarks/results/gpu-*.json` by `python benchmarks/gpu/run.py`; a test compares the two.

    nox -s gpu                                    # in an environment of its own
    python benchmarks/gpu/run.py                  # the same from a source tree, with torch, Triton and CuPy installed
    python benchmarks/gpu/run.py gemv --budget 300
    python benchmarks/gpu/run.py --dry-run        # what would run, and what each backend says of this machine

Ratios are made within one run: a layer's time over what the same process measured of the device itself. That is
copying memory, an empty kernel, or a dense bfloat16 product. Weights rotate through more copies than the cache holds.
Every answer is checked against float64. Times are those of CUDA graphs, candidates interleaved. What the host adds to
a call is measured separately.
"""
_NOTHING = """
**Not yet run on hardware.** Every test run compiles a chosen set of the kernels for each architecture, and checks the
instructions. Numbers are checked in Triton's interpreter. Nothing here says how fast the kernels are, or that they
run.
"""


def _targets(result: dict[str, Any]) -> Iterator[str]:
    yield "| target | met | worst | by |\n|---|---|---|---|"
    verdicts: Sequence[dict[str, Any]] = result["verdicts"]
    for target in dict.fromkeys(one["target"] for one in verdicts):
        own = [one for one in verdicts if one["target"] == target and one["ratio"] is not None]
        if not own:
            yield f"| {target} | not measured | | |"
            continue
        worst = min(own, key=lambda one: -one["ratio"] if one["is_most"] else one["ratio"])
        met = sum(one["verdict"] == "met" for one in own)
        yield f"| {target} | {met} of {len(own)} | {worst['ratio']:.3g} | {worst['subject']} |"


def _cases(result: dict[str, Any]) -> Iterator[str]:
    reports = result["stages"].get("cases", {}).get("reports", {})
    if not reports:
        yield "The contract cases have not been run on this device."
        return
    yield "| backend, format | cases | passed | failed | not declared | not testable here | not run |"
    yield "|---|---|---|---|---|---|---|"
    for name, report in reports.items():
        counts = report["counts"]
        bad = sum(counts.get(word, 0) for word in ("fail", "crash", "timeout"))
        numbers = (counts.get("pass", 0), bad, counts.get("not_declared", 0), counts.get("not_testable", 0))
        yield f"| {name} | {report['cases']} | {' | '.join(map(str, numbers))} | {report['not_run']} |"


def _spiking(result: dict[str, Any]) -> Iterator[str]:
    layers = result["stages"].get("spiking", {}).get("layers", [])
    if layers:
        yield "\n| spiking network | µs a step |\n|---|---|"
    for one in layers:
        yield f"| {one['name']} | {one['calls']['a step']['median']:.1f} |"


def _section(result: dict[str, Any], file: Path) -> Iterator[str]:
    device = result["device"]
    versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items() if version)
    yield f"\n## {device['name']} ({device['architecture']})\n"
    yield f"{device['memory_bytes'] / 1e9:.0f} GB, {device['processors']} multiprocessors, {versions}.\n"
    for run in result["runs"].values():
        facts, limits = run["environment"], run["limits"]
        yardsticks = "no yardsticks" if limits is None else _yardsticks(limits)
        yield f"- {facts['date'][:10]}, commit {facts['commit']}: {yardsticks}"
    yield ""
    yield from _targets(result)
    yield ""
    yield from _cases(result)
    yield from _spiking(result)
    for kind in ("gemv", "gemm"):
        picture = file.with_name(f"{file.stem}-{kind}.png")
        if picture.exists():
            yield f"\n![{kind}](../benchmarks/results/{picture.name})"


def _yardsticks(limits: dict[str, Any]) -> str:
    empty = "" if limits["empty_us"] is None else f", empty kernel {limits['empty_us']:.2f} µs"
    copy, product = limits["copy_gb_per_s"], limits["bf16_tflop_per_s"]
    return f"copy {copy:,.0f} GB/s (read + written){empty}, bf16 product {product:,.0f} TFLOP/s"


def text_of(folder: Path) -> str:
    """Return the page for the result files of a folder; without any, it says that nothing ran."""
    lines = [_HEAD]
    files = sorted(folder.glob("gpu-*.json"))
    for file in files:
        lines += _section(json.loads(file.read_text(encoding="utf-8")), file)
    if not files:
        lines.append(_NOTHING.strip())
    return "\n".join(lines).rstrip() + "\n"


def write() -> Path:
    """Write the page for the stored results, and return where it is."""
    PAGE.write_text(text_of(record.RESULTS), encoding="utf-8")
    return PAGE
