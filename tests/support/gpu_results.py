"""Hand-made results of a run on a GPU: they meet every target, but for what is changed."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.dense import NAME

__all__ = ["LARGE", "SMALL", "call", "gpu_result", "table"]

LARGE, SMALL = (8192, 8192), (2048, 2048)
COPY, EMPTY = 4000.0, 1.5
_RUN = "2026-01-01T00:00:00+00:00"


def call(format_: str, us: float, size: int, *, role: str = "ours", rows: int = 1, elements: int = 1) -> dict[str, Any]:
    """Return one timed call."""
    return {
        "library": "q4core" if role == "ours" else "torch",
        "role": role,
        "format": format_,
        "precision": "exact" if role == "ours" else "bf16",
        "weight_bytes": size,
        "median": us,
        "p10": us,
        "p90": us,
        "gb_per_s": size / us / 1e3,
        "tflop_per_s": 2 * rows * elements / us / 1e6,
    }


def table(shape: tuple[int, int], rows: int, us: dict[str, float]) -> dict[str, Any]:
    """Return a table of calls by name; ``bf16`` stands for cuBLAS, and ``nf4, path gemm`` for one path alone."""
    elements = shape[0] * shape[1]
    calls = {}
    for name, value in us.items():
        is_dense = name == "bf16"
        label = NAME if is_dense else name.replace(name.split(",")[0], f"{name.split(',')[0]} exact", 1)
        size = 2 * elements if is_dense else elements * 9 // 16
        format_ = "bf16" if is_dense else name.split(",")[0]
        role = "peer" if is_dense else "ours"
        calls[label] = call(format_, value, size, role=role, rows=rows, elements=elements)
    kind = "gemv" if rows <= 8 else "gemm"
    name = f"{kind} {shape[0]}x{shape[1]}, M={rows}"
    return {"name": name, "shape": shape, "rows": rows, "calls": calls, "does_not_run": {}}


def gpu_result(**changed: float) -> dict[str, Any]:
    """Return a result of every stage."""
    us = {"large": 11.0, "small": 2.0, "dense": 40.0, "gemm": 110.0, "cublas": 100.0, "quantiser": 50.0} | changed
    us = {"host": 9.0, "probe": 100.0, "failed": 0.0, "left": 0.0} | us
    quantised = {"moved_bytes": 170_000_000, "median": us["quantiser"], "gb_per_s": 170_000_000 / us["quantiser"] / 1e3}
    stages: dict[str, dict[str, Any]] = {
        "gemv": {
            "tables": [
                table(LARGE, 1, {"nf4": us["large"], "bf16": us["dense"]}),
                table(SMALL, 1, {"nf4": us["small"], "bf16": 5.0}),
                table(LARGE, 8, {"nf4": 900.0, "bf16": 40.0}),
            ]
        },
        "gemm": {
            "tables": [
                table(LARGE, 64, {"nf4": 900.0, "bf16": 40.0, "nf4, path gemm": 900.0, "nf4, path dense": 950.0}),
                table(
                    LARGE,
                    512,
                    {"nf4": us["gemm"], "bf16": us["cublas"], "nf4, path gemm": 120.0, "nf4, path dense": 110.0},
                ),
            ],
            "refused": {"nf4-cuda, nf4 fp4": "it says why"},
            "left_out": ["28672x8192"],
        },
        "quantiser": {"calls": {"nvfp4, 8192x8192, bfloat16": quantised}},
        "overhead": {"layers": [{"name": "nf4 1024x1024", "calls": {"forward with out=": {"median": us["host"]}}}]},
        "probe": {"runs": {"warm": {"layers": {"nf4": {"prepare_ms": 30.0, "probe_ms": us["probe"]}}}}},
        "cases": {
            "reports": {
                "nf4-cuda, nf4": {
                    "passed": not us["failed"] and not us["left"],
                    "cases": 100,
                    "counts": {"pass": 90, "fail": int(us["failed"]), "not_declared": 10},
                    "not_run": int(us["left"]),
                    "failures": [{"case": "TC-09/a", "outcome": "fail", "message": "off"}] * int(us["failed"]),
                    "seconds": 3.0,
                }
            }
        },
        "tests": {"folders": {"tests": {"passed": True, "output": "3 passed"}}},
    }
    limits = {"calls": {}, "copy_gb_per_s": COPY, "empty_us": EMPTY, "bf16_tflop_per_s": 790.0}
    return {
        "device": {
            "name": "NVIDIA H200",
            "architecture": "sm_90",
            "memory_bytes": 140e9,
            "processors": 132,
            "versions": {"torch": "2.11", "cupy-cuda13x": None},
        },
        "is_tiny": False,
        "backends": {},
        "runs": {_RUN: {"environment": {"date": _RUN, "commit": "abc"}, "limits": limits}},
        "stages": {name: {"run": _RUN, "seconds": 1.0, **stage} for name, stage in stages.items()},
    }
