"""Targets and verdicts of the GPU backends, computed from the results of a run alone.

Every ratio is made within one run: of a stage's numbers and of the yardsticks that the same process measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.gpu.dense import NAME as DENSE
from benchmarks.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LARGE_BYTES", "crossovers", "judge"]

LARGE_BYTES = 32 << 20
_GEMM_ROWS = 512
_SMALL_SHARE = 0.85


def _ours(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the layers as they choose their paths, without single paths and without 4-bit activations."""
    return {
        name: call
        for name, call in table["calls"].items()
        if call["role"] == "ours" and call["precision"] == "exact" and ", path " not in name
    }


def _gemv(table: dict[str, Any], limits: dict[str, Any]) -> Iterator[Verdict]:
    copy, empty = limits["copy_gb_per_s"], limits["empty_us"]
    dense = table["calls"].get(DENSE)
    for name, call in _ours(table).items():
        subject = f"{name}, {table['name']}"
        if call["weight_bytes"] >= LARGE_BYTES:
            target = "gemv, weights of 32 MB and more: 0.80 of the copy bandwidth"
            share = call["gb_per_s"] / copy
            yield Verdict(target, subject, share, 0.80, against="copy")
            faster = None if dense is None else dense["median"] / call["median"]
            yield Verdict("gemv, large layers: 3 times as fast as bf16 F.linear", subject, faster, 3.0, against=DENSE)
        else:
            allowed = None if empty is None else empty + call["weight_bytes"] / (_SMALL_SHARE * copy * 1e3)
            ratio = None if allowed is None else call["median"] / allowed
            target = "gemv, smaller weights: empty kernel + bytes / (0.85 of the copy bandwidth)"
            yield Verdict(target, subject, ratio, 1.0, is_most=True, against="empty kernel and copy")


def _gemm(table: dict[str, Any]) -> Iterator[Verdict]:
    dense = table["calls"].get(DENSE)
    for name, call in _ours(table).items():
        ratio = None if dense is None else dense["median"] / call["median"]
        yield Verdict("gemm, M >= 512: 0.80 of bf16 cuBLAS", f"{name}, {table['name']}", ratio, 0.80, against=DENSE)


def _quantiser(stage: dict[str, Any], limits: dict[str, Any]) -> Iterator[Verdict]:
    for name, call in stage["calls"].items():
        if call["moved_bytes"] >= LARGE_BYTES:
            share = call["gb_per_s"] / limits["copy_gb_per_s"]
            yield Verdict("quantiser: 0.7 of the copy bandwidth", name, share, 0.7, against="copy")


def _overhead(stage: dict[str, Any]) -> Iterator[Verdict]:
    for layer in stage["layers"]:
        us = layer["calls"]["forward with out="]["median"]
        target = "host overhead per forward, outside graphs: 12 µs"
        yield Verdict(target, layer["name"], us, 12.0, is_most=True, against="the host's clock")


def _probe(stage: dict[str, Any]) -> Iterator[Verdict]:
    warm = stage["runs"].get("warm", {})
    for name, layer in warm.get("layers", {}).items():
        ms = layer.get("probe_ms")
        yield Verdict("self-probe, warm cache: 150 ms", name, ms, 150.0, is_most=True, against="the host's clock")


def _cases(stage: dict[str, Any]) -> Iterator[Verdict]:
    for name, report in stage["reports"].items():
        ran = report["cases"] - report["not_run"]
        bad = len(report["failures"])
        share = (ran - bad) / report["cases"] if report["cases"] else None
        yield Verdict("contract cases: each one ran, and none failed", name, share, 1.0, against="the table of cases")


def judge(result: dict[str, Any]) -> list[Verdict]:
    """Return a verdict for each target and each subject that was measured; of a tiny run, those of the cases alone.

    Args:
        result: What the result file holds.
    """
    found: list[Verdict] = []
    for name, stage in result["stages"].items():
        limits = result["runs"][stage["run"]]["limits"]
        if name == "cases" and "reports" in stage:
            found += _cases(stage)
        elif result["is_tiny"] or "error" in stage:
            continue
        elif name == "gemv" and limits is not None:
            found += [v for table in stage["tables"] if table["rows"] == 1 for v in _gemv(table, limits)]
        elif name == "gemm":
            found += [v for table in stage["tables"] if table["rows"] >= _GEMM_ROWS for v in _gemm(table)]
        elif name == "quantiser" and limits is not None:
            found += _quantiser(stage, limits)
        elif name == "overhead":
            found += _overhead(stage)
        elif name == "probe":
            found += _probe(stage)
    return found


def crossovers(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return, for each shape and format whose paths were measured alone, which path was fastest at each M."""
    best: dict[tuple[int, int, str], dict[int, str]] = {}
    for stage in result["stages"].values():
        for table in stage.get("tables", ()):
            alone = {name: call for name, call in table["calls"].items() if ", path " in name}
            for format_ in {call["format"] for call in alone.values()}:
                own = {name: call["median"] for name, call in alone.items() if call["format"] == format_}
                fastest = min(own, key=lambda name: own[name])
                best.setdefault((*table["shape"], format_), {})[table["rows"]] = fastest.split(", path ")[1]
    return [
        {
            "shape": [outputs, inputs],
            "format": format_,
            "fastest_by_rows": {str(m): path for m, path in sorted(rows.items())},
        }
        for (outputs, inputs, format_), rows in best.items()
    ]
