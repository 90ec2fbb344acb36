"""Small layers, where the call costs as much as the product: ``Q4Linear.forward`` compared with the bare kernel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import attrs
import torch

from benchmarks import record
from benchmarks.cpu import ours
from benchmarks.weights import weight_of
from q4core.extension import LayerHandle

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["measure"]

_SHAPES = ((576, 576), (1536, 576))
_FORMATS = ("q4_0", "nf4", "nvfp4")


def measure(*, is_quick: bool = False) -> list[dict[str, Any]]:
    """Return one result for each shape and format, with int8 activations and one row."""
    rounds, repeats = (11, 100) if is_quick else (30, 300)
    return [_measure(shape, name, rounds, repeats) for shape in _SHAPES for name in _FORMATS]


def _kernel(backend: Callable[[], object], meta: Any) -> Callable[[], None]:
    """Return the native call, as the backend's own call makes it, with its arguments fixed."""
    call, stub = meta.call, mock.Mock()
    with mock.patch.object(type(meta), "call", attrs.evolve(call, linear=stub)):
        backend()
    return functools.partial(call.linear, *stub.call_args.args)


def _measure(shape: tuple[int, int], name: str, rounds: int, repeats: int) -> dict[str, Any]:
    layer = ours.session("int8").linear(weight_of(name, torch.randn(shape)))
    handle = LayerHandle(layer)  # the bare kernel is the yardstick
    x, out = torch.randn(1, shape[1]), torch.empty(1, shape[0])
    path = handle.segments[0].path.name
    backend = functools.partial(handle.backend.linear, handle.prepared, x, out, bias=None, path=path)
    with torch.no_grad():
        samples = record.interleaved_us(
            {
                "kernel": _kernel(backend, handle.prepared.meta),
                "backend": backend,
                "forward with out=": functools.partial(layer.forward, x, out=out),
                "forward without out=": functools.partial(layer.forward, x),
            },
            rounds=rounds,
            repeats=repeats,
        )
    return {
        "name": f"{name} {shape[0]}x{shape[1]}",
        "shape": shape,
        "format": name,
        "threads": torch.get_num_threads(),
        "calls": {key: record.summary(values) for key, values in samples.items()},
    }
