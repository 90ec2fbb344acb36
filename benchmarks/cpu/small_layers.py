"""Small layers, where the call costs as much as the product: ``Q4Linear.forward`` beside the bare kernel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks import record
from benchmarks.cpu import ours
from benchmarks.weights import weight_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["measure"]

_SHAPES = ((576, 576), (1536, 576))
_FORMATS = ("q4_0", "nf4", "nvfp4")


def measure(*, is_quick: bool = False) -> list[dict[str, Any]]:
    """Return one result for each shape and format, with int8 activations and one row."""
    rounds, repeats = (11, 100) if is_quick else (30, 300)
    return [_measure(shape, name, rounds, repeats) for shape in _SHAPES for name in _FORMATS]


def _kernel(backend: Callable[[], None], meta: Any) -> Callable[[], None]:
    """Return the native call that a call of the backend makes, with its arguments fixed."""
    from q4_cpu_native.layout import matrix_of  # noqa: PLC0415  # missing where it was not built

    stub = mock.Mock()
    with mock.patch("q4_cpu_native.backend.matrix_of", return_value=stub):
        backend()
    return functools.partial(matrix_of(meta).linear, *stub.linear.call_args.args)


def _measure(shape: tuple[int, int], name: str, rounds: int, repeats: int) -> dict[str, Any]:
    layer = ours.session("int8").linear(weight_of(name, torch.randn(shape)))
    ready = layer._require_ready()  # noqa: SLF001  # the bare kernel is the yardstick
    x, out = torch.randn(1, shape[1]), torch.empty(1, shape[0])
    path = ready.plan.segments[0].path.name
    backend = functools.partial(ready.plan.backend.linear, ready.prepared, x, out, bias=None, path=path)
    with torch.no_grad():
        samples = record.interleaved_us(
            {
                "kernel": _kernel(backend, ready.prepared.meta),
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
