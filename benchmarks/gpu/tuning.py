"""``tune``: other launch configurations than those of ``configs.json``, for people who choose them.

Each kind of launch is tried in a process of its own: all compile at once, and take turns at measuring.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import ours
from benchmarks.gpu.place import find_place
from benchmarks.gpu.timing import elapsed_us, recorded, synchronize
from benchmarks.problem import Problem
from q4_triton_kernels import configs, plan, schedule

if TYPE_CHECKING:
    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place

__all__ = ["measure"]

_SHAPE, _TINY_SHAPE = (8192, 8192), (64, 128)
_FAMILIES = {"nf4": ("nf4-cuda", "blocks"), "nvfp4": ("nvfp4-native", "weights")}
"""A format of each family of gemm, and its backend."""
_SAMPLES = 9
_SMALL = ((64, 4, 4), (64, 8, 4), (128, 4, 3), (128, 8, 3))
_LARGE = ((128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3))
_GEMM: dict[int, list[tuple[int, ...]]] = {
    16: [(n, 16, w, s) for n, w, s in (*_SMALL, (32, 4, 3), (32, 4, 5), (64, 4, 3), (64, 4, 5), (128, 8, 4))],
    32: [(n, 32, w, s) for n, w, s in (*_SMALL, (32, 4, 4), (64, 4, 3))],
    64: [(n, 64, w, s) for n, w, s in (*_SMALL, (64, 4, 3), (64, 8, 3), (128, 8, 4), (256, 8, 3))],
    128: [*_LARGE, (64, 128, 4, 4), (64, 64, 4, 4), (256, 128, 8, 3)],
    512: [*_LARGE, (64, 128, 4, 4), (128, 256, 8, 3), (256, 128, 8, 3), (64, 256, 8, 3)],
}
"""M → out-features, rows of x, warps and stages of a tile."""
_GEMV = {
    1: [(r, t, w, 1) for r in (4, 8, 16) for t in (64, 128) for w in (2, 4, 8)] + [(2, 128, 4, 1), (8, 256, 8, 1)],
    8: [(r, t, w, 1) for r in (1, 2, 4) for t in (64, 128) for w in (2, 4, 8)],
}
"""M → out-features, units of in-features, warps and stages."""
_DENSE = [(r, w) for r in (8, 16, 32, 64) for w in (2, 4, 8)]
"""Out-features of a program that makes weights dense, and warps."""


def measure(place: Place, deadline: Deadline, *, jobs: int) -> dict[str, Any]:
    """Return for each format, kind of launch and M the microseconds of each configuration, the fastest one first."""
    kinds = [
        (name, kind, rows)
        for name in _FAMILIES
        for kind, table in (("gemm", _GEMM), ("gemv", _GEMV), ("dense", {256: _DENSE}))
        for rows in table
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    found: dict[str, Any] = {"shape": _SHAPE, "kinds": {}, "errors": {}}

    def one(kind: tuple[str, str, int]) -> None:
        label = f"{kind[0]}, {kind[1]}, M={kind[2]}"
        index, seconds = str(place.device.index or 0), str(deadline.left)
        command = [sys.executable, "-m", "benchmarks.gpu.tuning", index, seconds, kind[0], kind[1], str(kind[2])]
        try:
            done = subprocess.run(  # noqa: S603  # an interpreter like this one, with this module
                command, env=environment, capture_output=True, text=True, check=False, timeout=deadline.left + 10
            )
        except subprocess.TimeoutExpired:
            found["errors"][label] = "no time was left"
            return
        if done.returncode:
            found["errors"][label] = done.stderr[-600:]
        else:
            found["kinds"][label] = json.loads(done.stdout.splitlines()[-1])

    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
        list(pool.map(one, kinds))
    return found


def _use(table: dict[str, Any], name: str, kind: str, rows: int, tile: tuple[int, ...]) -> None:
    """Let kernels of this process be launched so from now on."""
    if kind == "gemm":
        n, m, warps, stages = tile
        table["gemm"][_FAMILIES[name][1]] = [{"m": None, "bn": n, "bm": m, "warps": warps, "stages": stages}]
    elif kind == "gemv":
        r, t, warps, stages = tile
        table["gemv"] = [
            {"rows": count, "r": r, "t": t, "warps": warps, "stages": stages} for count in sorted({rows, 8})
        ]
    else:
        table["dense"] = {"r": tile[0], "warps": tile[1]}
    for cached in (configs.config_for, schedule.schedule_for, schedule._stretches, plan._factory, plan.plan_for):  # noqa: SLF001  # no other way to launch what the table does not hold
        cached.cache_clear()


def _tiles(kind: str, rows: int) -> list[tuple[int, ...]]:
    tables: dict[str, list[tuple[int, ...]]] = {
        "gemm": _GEMM.get(rows, []),
        "gemv": [*_GEMV.get(rows, [])],
        "dense": [*_DENSE],
    }
    return tables[kind]


def _try(place: Place, seconds: float, name: str, kind: str, rows: int) -> list[dict[str, Any]]:
    """Compile every configuration, then measure each; wrong ones and those that do not compile say so."""
    end = time.monotonic() + seconds
    shape = _SHAPE if place.is_cuda else _TINY_SHAPE
    made = ours.make(_FAMILIES[name][0], name, Problem(*shape), place)
    copies = made.prepared
    family = "dequant" if kind == "dense" else kind
    backend: Any = made.handle.backend
    x = torch.randn(rows, shape[1], device=place.device).to(ours.DTYPE)
    out = torch.empty(rows, shape[0], device=place.device, dtype=ours.DTYPE)
    wanted = made.layers[0](x).float()
    table = configs._table()[place.architecture.removeprefix("sm_")]  # noqa: SLF001  # as above
    ready: list[tuple[tuple[int, ...], Any]] = []
    found: list[dict[str, Any]] = []
    for tile in _tiles(kind, rows):
        if time.monotonic() > end - 10:
            found.append({"tile": tile, "error": "no time was left"})
            continue
        try:
            _use(table, name, kind, rows, tile)
            meta, target = copies[0].meta, backend.target(x.device)
            plan.plan_for(meta, x.dtype, out.dtype, target, x.device).load(frozenset({family}), (rows, rows))
            calls = [functools.partial(made.linear, one, x, out, bias=None, path=f"{family}_w4a16") for one in copies]
            calls[0]()
            error = float((out.float() - wanted).norm() / wanted.norm())
            ready.append((tile, recorded(calls, place)))
            found.append({"tile": tile, "error": None if error < 1e-2 else f"relative error {error:.3g}"})  # noqa: PLR2004  # bfloat16 rounds by 2^-9
        except Exception as error:  # noqa: BLE001  # a configuration that the device refuses is a result
            found.append({"tile": tile, "error": f"{type(error).__name__}: {str(error)[:200]}"})
    with Path("/tmp/q4-tuning.lock").open("w") as lock:  # noqa: S108  # one process measures at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        synchronize(place)
        us = {tile: [elapsed_us(run.run, 1, place) / run.turns for _ in range(_SAMPLES)] for tile, run in ready}
    for one in found:
        if one["tile"] in us:
            one["us"] = round(sorted(us[one["tile"]])[_SAMPLES // 2], 2)
    return sorted(found, key=lambda one: one.get("us", 1e9))


if __name__ == "__main__":
    index, seconds, name, kind, rows = sys.argv[1:]
    sys.stdout.write(json.dumps(_try(find_place(int(index)), float(seconds), name, kind, int(rows))) + "\n")
