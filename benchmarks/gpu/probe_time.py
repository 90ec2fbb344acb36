"""Time of the first layer of a kind: ``prepare``, which compiles, and the self-probe; in processes of their own.

The second process finds on disk what the first one compiled: this is the warm cache of the target.
"""

from __future__ import annotations

import itertools
import json
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
from benchmarks.weights import weight_of
from q4_conformance.measurement.recording import recorded

if TYPE_CHECKING:
    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place

__all__ = ["first_layers", "measure"]

_SHAPE, _TINY_SHAPE = (4096, 4096), (64, 128)
_RUNS = ("cold or warm", "warm")


def measure(place: Place, deadline: Deadline) -> dict[str, Any]:
    """Return what each process measured, the one with the warm cache last."""
    found: dict[str, Any] = {"runs": {}, "left_out": []}
    for name in _RUNS:
        if deadline.is_over():
            found["left_out"].append(name)
            continue
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(  # noqa: S603  # an interpreter like this one, with this module
            [sys.executable, "-m", "benchmarks.gpu.probe_time", str(place.device.index or 0)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=deadline.left + 60,
        )
        if done.returncode:
            found["runs"][name] = {"error": done.stderr[-2000:]}
            continue
        found["runs"][name] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_layers(place: Place) -> dict[str, Any]:
    """Return what the first layer of each format costs in this process."""
    shape = _SHAPE if place.is_cuda else _TINY_SHAPE
    warm = torch.randn(256, 256, device=place.device)
    (warm @ warm).sum().item()  # the device and its libraries start here
    layers: dict[str, Any] = {}
    for backend, instance in ours.backends().items():
        for name, precision in itertools.product(ours.formats_of(instance), ours.precisions_of(instance)):
            label = name if precision == ours.EXACT else f"{name} {precision}"
            dense = torch.randn(128, shape[1], generator=torch.Generator().manual_seed(3)) / 50
            weight = q4.cat([weight_of(name, dense).to(place.device)] * max(1, shape[0] // 128))
            own = q4.Registry()
            with recorded() as recording:
                started = time.perf_counter()
                try:
                    ours.session(backend, place, precision, own=own).linear(weight)
                except q4.Q4Error as error:
                    layers[label] = {"refused": str(error)}
                    continue
                synchronize(place)
                seconds = time.perf_counter() - started
            probes = {fields["path"]: fields["microseconds"] / 1e3 for fields in recording.named("q4.probe")}
            prepared = [fields["microseconds"] / 1e3 for fields in recording.named("q4.prepare")]
            layers[label] = {
                "backend": backend,
                "layer_ms": seconds * 1e3,
                "prepare_ms": sum(prepared),
                "probe_ms": sum(probes.values()),
                "probes_ms": probes,
            }
    return {"shape": shape, "layers": layers}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(first_layers(find_place(int(sys.argv[1])))) + "\n")
