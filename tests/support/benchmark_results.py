"""Hand-made results of benchmarks: stages that meet every target, but for what is changed."""

from __future__ import annotations

from typing import Any

__all__ = ["SHAPE", "decode_stage", "prefill_stage", "stage_of"]

SHAPE = (4096, 4096)
WEIGHT_BYTES = 9_437_184


def _call(library: str, format_: str, precision: str, us: float, rows: int = 1) -> dict[str, Any]:
    role = "yardstick" if format_ in {"read", "matmul"} else "ours" if library == "q4core" else "peer"
    return {
        "library": library,
        "role": role,
        "format": format_,
        "precision": precision,
        "weight_bytes": WEIGHT_BYTES,
        "median": us,
        "p10": us * 0.9,
        "p90": us * 1.1,
        "gb_per_s": WEIGHT_BYTES / us / 1e3,
        "gflop_per_s": 2 * rows * SHAPE[0] * SHAPE[1] / us / 1e3,
    }


def stage_of(rows: int, threads: int, calls: dict[str, tuple[str, str, str, float]]) -> dict[str, Any]:
    """Return a stage of calls given as (library, format, precision, microseconds)."""
    return {
        "name": f"M={rows}, {threads} threads",
        "shape": SHAPE,
        "rows": rows,
        "threads": threads,
        "weights_from": "memory",
        "calls": {name: _call(*values, rows=rows) for name, values in calls.items()},
    }


def decode_stage(threads: int = 2, **changed: float) -> dict[str, Any]:
    """Return a decode stage that meets every target, but for what is changed."""
    us = {
        "read": 230.0,
        "ours": 250.0,
        "exact": 400.0,
        "ggml": 400.0,
        "ort": 300.0,
        "nvfp4": 600.0,
        "bitsandbytes": 20_000.0,
        "dequantised": 20_000.0,
        "torchao": 500_000.0,
    } | changed
    return stage_of(
        1,
        threads,
        {
            "read: a": ("torch", "read", "none", us["read"]),
            "read: b": ("torch", "read", "none", us["read"] * 2),
            "nf4 int8": ("q4core", "nf4", "int8", us["ours"]),
            "nvfp4 int8": ("q4core", "nvfp4", "int8", us["ours"]),
            "nf4 exact": ("q4core", "nf4", "exact", us["exact"]),
            "ggml Q4_0": ("ggml", "Q4_0", "int8", us["ggml"]),
            "ggml NVFP4": ("ggml", "NVFP4", "int8", us["nvfp4"]),
            "onnxruntime int4 g32": ("onnxruntime", "int4 g32", "int8", us["ort"]),
            "bitsandbytes NF4 fp32": ("bitsandbytes", "nf4", "fp32", us["bitsandbytes"]),
            "bitsandbytes NF4 fp32, dequantised": ("bitsandbytes", "nf4", "fp32", us["dequantised"]),
            "torchao NVFP4 bf16": ("torchao", "nvfp4", "bf16", us["torchao"]),
        },
    )


def prefill_stage(rows: int = 64, **changed: float) -> dict[str, Any]:
    """Return a prefill stage that meets every target, but for what is changed."""
    us = {"ours": 4000.0, "exact": 8000.0, "ggml": 9000.0, "ort": 5000.0, "torch": 9000.0} | changed
    return stage_of(
        rows,
        2,
        {
            "nf4 int8": ("q4core", "nf4", "int8", us["ours"]),
            "nf4 exact": ("q4core", "nf4", "exact", us["exact"]),
            "ggml Q4_0": ("ggml", "Q4_0", "int8", us["ggml"]),
            "onnxruntime int4 g32": ("onnxruntime", "int4 g32", "int8", us["ort"]),
            "torch fp32": ("torch", "fp32", "fp32", us["torch"]),
            "matmul: fp32": ("torch", "matmul", "fp32", 20_000.0),
        },
    )
