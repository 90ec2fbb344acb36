"""``compile``: every kernel of the measured layers, compiled by several processes at once.

Triton compiles one kernel at a time in each process, and stores it on disk: the stages that follow find it there.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks.gpu import ours
from benchmarks.gpu.place import find_place
from benchmarks.gpu.timing import synchronize
from benchmarks.problem import Problem

if TYPE_CHECKING:
    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place

__all__ = ["measure"]

_SHAPES, _TINY_SHAPE = ((8192, 8192), (1024, 4096)), (64, 128)
_ROWS, _TINY_ROWS = (1, 2, 4, 8, 16, 64, 128, 512, 2048, 8192), (1, 17)


def measure(place: Place, deadline: Deadline, *, jobs: int) -> dict[str, Any]:
    """Compile, and return the seconds that each kind of layer took, and what went wrong.

    Args:
        place: Where.
        deadline: What has not begun by then is left out; a process that is not done ends some seconds later.
        jobs: Processes at once.
    """
    kinds = [
        (backend, name, precision, use)
        for use in ("forward", "gradient")
        for backend, instance in ours.backends().items()
        for name in ours.formats_of(instance)
        for precision in ours.precisions_of(instance)
        if use == "forward" or precision == ours.EXACT
    ]
    kinds = kinds if place.is_cuda else kinds[:1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    found: dict[str, Any] = {"kinds": {}, "errors": {}, "left_out": []}

    def one(kind: tuple[str, str, str, str]) -> None:
        label, started = ", ".join(kind), time.perf_counter()
        if deadline.is_over():
            found["left_out"].append(label)
            return
        try:
            done = subprocess.run(  # noqa: S603  # an interpreter like this one, with this module
                [sys.executable, "-m", "benchmarks.gpu.warming", str(place.device.index or 0), *kind],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=deadline.left + 5,
            )
        except subprocess.TimeoutExpired:
            found["left_out"].append(label)
            return
        if done.returncode:
            found["errors"][label] = done.stderr[-600:]
        found["kinds"][label] = round(time.perf_counter() - started, 1)

    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
        list(pool.map(one, kinds))
    return found


def _compile(place: Place, backend: str, name: str, precision: str, use: str) -> None:
    """Make a layer of each shape, and run every path, or gradient, with every number of rows."""
    for shape in _SHAPES if place.is_cuda else (_TINY_SHAPE,):
        try:
            made = ours.make(backend, name, Problem(*shape), place, precision, gradients=use == "gradient")
        except q4.BackendUnavailableError:  # the stages that measure say why
            return
        layer, alone = made.layers[0], made.prepared[0]
        for rows in _ROWS if place.is_cuda else _TINY_ROWS:
            x = torch.zeros(rows, shape[1], device=place.device, dtype=ours.DTYPE, requires_grad=use == "gradient")
            y = layer(x)
            if use == "gradient":
                y.sum().backward()
                continue
            for path in (path for path in made.paths() if path.covers(rows)):
                made.linear(alone, x, torch.empty_like(y), bias=None, path=path.name)
    synchronize(place)


if __name__ == "__main__":
    _compile(find_place(int(sys.argv[1])), *sys.argv[2:])
