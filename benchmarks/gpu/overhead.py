"""Host time per call, outside graphs: ``Q4Linear.forward`` compared with a bare backend call and ``F.linear``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record
from benchmarks.gpu import ours
from benchmarks.gpu.timing import synchronize
from benchmarks.problem import Problem
from q4core.extension import LayerHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place

__all__ = ["measure"]

_SHAPES, _TINY_SHAPES = ((1024, 1024), (576, 576)), ((64, 128),)
_FORMATS = frozenset({"nf4", "int4 g128", "nvfp4", "mxfp4"})


def _calls(layer: q4.Q4Linear, shape: tuple[int, int], place: Place) -> dict[str, Callable[[], object]]:
    """Return what is timed: all of it starts work and waits for none."""
    handle = LayerHandle(layer)  # the bare backend is the yardstick
    path = handle.segments[0].path.name
    x = torch.randn(1, shape[1], device=place.device, dtype=ours.DTYPE)
    out = torch.empty(1, shape[0], device=place.device, dtype=ours.DTYPE)
    weight = torch.randn(shape, device=place.device, dtype=ours.DTYPE)
    return {
        "forward with out=": functools.partial(layer.forward, x, out=out),
        "forward without out=": functools.partial(layer.forward, x),
        "backend": functools.partial(handle.backend.linear, handle.prepared, x, out, bias=None, path=path),
        "bf16 F.linear": functools.partial(torch.nn.functional.linear, x, weight),
    }


def measure(place: Place, deadline: Deadline) -> dict[str, Any]:
    """Return the host's microseconds of each kind of call, for small layers and one row."""
    rounds, repeats = (31, 100) if place.is_cuda else (3, 1)
    found: dict[str, Any] = {"layers": [], "refused": {}, "left_out": []}
    for shape in _SHAPES if place.is_cuda else _TINY_SHAPES:
        for backend, instance in ours.backends().items():
            for name in ours.formats_of(instance):
                label = f"{name} {shape[0]}x{shape[1]}"
                if name not in _FORMATS:
                    continue
                if deadline.is_over():
                    found["left_out"].append(label)
                    continue
                for precision in ours.precisions_of(instance):
                    subject = label if precision == ours.EXACT else f"{label} {precision}"
                    try:
                        layer = ours.make(backend, name, Problem(*shape), place, precision).layers[0]
                    except q4.Q4Error as error:
                        found["refused"][f"{backend}, {subject}"] = str(error)
                        continue
                    with torch.no_grad():
                        samples = record.interleaved_us(
                            _calls(layer, shape, place),
                            rounds=rounds,
                            repeats=repeats,
                            settle=functools.partial(synchronize, place),
                        )
                    calls = {key: record.summary(values) for key, values in samples.items()}
                    facts = {"name": subject, "format": name, "precision": precision, "shape": shape}
                    found["layers"].append({**facts, "calls": calls})
    return found
