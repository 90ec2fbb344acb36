"""Decode and prefill on this CPU: our kernels, torch's dense products, and the read bandwidth, in one interleaved run.

``Q4_CPU_ISA`` chooses the instruction set, after which the result is named.

Weights rotate through more memory than the last-level cache holds. Every layer's answer is checked before it is timed.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

import torch
from matplotlib import pyplot as plt

import q4core as q4
from benchmarks import record

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = (4096, 4096)
ROWS = (4, 16, 64, 256)
FORMATS = ("nf4", "nvfp4", "mxfp4", "q4_0", "q4_1", "int4", "q8_0")
CACHE_BYTES = 96 << 20
"""More than a last-level cache; what rotates is at least as large."""
_DECODE = {"rounds": 30, "repeats": 8}
_PREFILL = {"rounds": 9, "repeats": 1}


def _isa() -> str:
    """Return the instruction set that runs, as its path's name has it."""
    weight = q4.quantize(torch.zeros(16, 64), "q4_0")
    config = q4.SessionConfig(backend="cpu-native")
    return (
        q4.Session(config, registry=q4.Registry(environment={})).linear(weight).diagnostics().path_name.split("_")[-1]
    )


def _layers(format_: str, precision: str, dense: torch.Tensor) -> list[q4.Q4Linear]:
    """Return copies of one layer that together exceed the cache, once its answer has been checked."""
    weight = q4.quantize(dense, format_)
    config = q4.SessionConfig(device="cpu", backend="cpu-native", activation_precision=precision)
    session = q4.Session(config, registry=q4.Registry(environment={}))
    first = session.linear(weight)
    path = first.diagnostics().segments[0].path
    x = q4.grid_activations(2, dense.shape[1], path.precision)
    reference = x.double() @ _exact(weight, path).T
    bound = q4.error_bound(reference, x.double().abs() @ _exact(weight, path).abs().T, dense.shape[1], x.dtype)
    if not bool(((first(x).double() - reference).abs() <= bound).all()):
        raise SystemExit(f"{format_}, {precision}: wrong numbers, so its speed says nothing")
    count = -(-CACHE_BYTES // first.diagnostics().prepared_bytes)
    return [first, *(session.linear(weight) for _ in range(count - 1))]


def _exact(weight: q4.PackedWeight, path: q4.KernelPath) -> torch.Tensor:
    if path.codebook is None:
        return q4.dequantize(weight, torch.float64)
    table = torch.tensor(path.codebook, dtype=torch.float64)
    scale = weight.resolved_scale().double().repeat_interleave(weight.block_size, 1)
    return table[weight.codes().long()] * scale


def _rotating(calls: list[Callable[[], object]]) -> Callable[[], object]:
    turns = itertools.cycle(calls)

    def turn() -> object:
        return next(turns)()

    return turn


def _dense_calls(dense: torch.Tensor, rows: int, dtype: torch.dtype) -> Callable[[], object]:
    weight = dense.to(dtype)
    copies = [weight, *(weight.clone() for _ in range(-(-CACHE_BYTES // (weight.numel() * weight.element_size()))))]
    x = torch.randn(rows, dense.shape[1]).to(dtype)
    return _rotating([lambda copy=copy: torch.nn.functional.linear(x, copy) for copy in copies])  # type: ignore[misc]  # bound


def measure() -> dict[str, dict[str, Any]]:
    """Return microseconds per call, bytes and operations of each thing measured, by name."""
    dense = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    bytes_of: dict[str, int] = {}
    decode: dict[str, Callable[[], object]] = {}
    prefill: dict[str, Callable[[], object]] = {}
    block = torch.ones(CACHE_BYTES // 8, dtype=torch.int64)
    decode["read"], bytes_of["read"] = block.sum, block.numel() * 8
    for dtype in (torch.float32, torch.bfloat16):
        name = f"torch {str(dtype).removeprefix('torch.')}"
        decode[name], bytes_of[name] = _dense_calls(dense, 1, dtype), dense.numel() * dtype.itemsize
    for rows in ROWS:
        prefill[f"torch float32, M={rows}"] = _dense_calls(dense, rows, torch.float32)
    for format_, precision in itertools.product(FORMATS, ("exact", "int8")):
        layers = _layers(format_, precision, dense)
        name = f"{format_} {precision}"
        bytes_of[name] = layers[0].diagnostics().prepared_bytes
        x, out = torch.randn(1, SHAPE[1]), torch.empty(1, SHAPE[0])
        decode[name] = _rotating([lambda layer=layer, x=x, out=out: layer(x, out=out) for layer in layers])  # type: ignore[misc]  # bound
        for rows in ROWS:
            many, wide = torch.randn(rows, SHAPE[1]), torch.empty(rows, SHAPE[0])
            prefill[f"{name}, M={rows}"] = _rotating(
                [lambda layer=layer, x=many, out=wide: layer(x, out=out) for layer in layers]  # type: ignore[misc]  # bound
            )
    with torch.no_grad():
        samples = record.interleaved_us(decode, **_DECODE) | record.interleaved_us(prefill, **_PREFILL)
    return {
        name: {**record.summary(values), **_rates(name, record.summary(values)["median"], bytes_of)}
        for name, values in samples.items()
    }


def _rates(name: str, median_us: float, bytes_of: dict[str, int]) -> dict[str, float]:
    if name in bytes_of:
        return {"gb_per_s": bytes_of[name] / median_us / 1e3}
    rows = int(name.rsplit("=", 1)[1])
    return {"gflop_per_s": 2 * rows * SHAPE[0] * SHAPE[1] / median_us / 1e3}


def draw(calls: dict[str, dict[str, Any]], path: str) -> None:
    """Draw decode in GB/s of weights beside the read bandwidth, and prefill in GFLOP/s beside torch's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = [name for name in calls if "gb_per_s" in calls[name] and name != "read"]
    left.barh(names, [calls[name]["gb_per_s"] for name in names], color="#3465a4")
    left.axvline(calls["read"]["gb_per_s"], color="#cc0000", label="reading a buffer (torch.sum)")
    left.invert_yaxis()
    left.set(xlabel="GB/s of weights", title=f"Decode, {SHAPE[0]}×{SHAPE[1]}, one row")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    for name in ("torch float32", "q4_0 exact", "q4_0 int8", "nvfp4 int8"):
        right.plot(ROWS, [calls[f"{name}, M={rows}"]["gflop_per_s"] for rows in ROWS], marker="o", label=name)
    right.set(xlabel="rows of x", ylabel="GFLOP/s", title="Prefill", xscale="log")
    right.set_xticks(ROWS, [str(rows) for rows in ROWS])
    right.minorticks_off()
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)
    figure.savefig(record.RESULTS / path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure, write ``cpu-<isa>.json`` and its picture, and print the table."""
    isa = _isa()
    calls = measure()
    written = record.write(f"cpu-{isa}", {"unit": "us", "shape": SHAPE, "isa": isa, "calls": calls})
    draw(calls, f"cpu-{isa}.png")
    for name, values in calls.items():
        rate = f"{values['gb_per_s']:7.1f} GB/s" if "gb_per_s" in values else f"{values['gflop_per_s']:7.0f} GFLOP/s"
        print(f"{name:<24} {values['median']:10.1f} µs  {rate}")
    print(f"written: {written}")


if __name__ == "__main__":
    main()
