"""The op ``q4_vllm::linear``: a packed layer by its name, for graphs that must not hold its weights.

vLLM compiles a model into graphs that it stores. They have the name of a layer, as they have those of attention, and
each process looks up its own.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["add_layer", "linear"]


class Runs(Protocol):
    """A packed layer: x [..., K] → [..., N]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""


_layers: weakref.WeakValueDictionary[str, Runs] = weakref.WeakValueDictionary()
_library = torch.library.Library("q4_vllm", "DEF")
_library.define("linear(Tensor x, str layer, int rows) -> Tensor")
linear: Callable[[torch.Tensor, str, int], torch.Tensor] = torch.ops.q4_vllm.linear
"""``linear(x, layer, rows)``: [..., rows] of x's dtype."""


def add_layer(prefix: str, layer: Runs) -> str:
    """Return the name by which the op finds a layer as long as it lives: its prefix, unless another model's has it."""
    names = itertools.chain([prefix], (f"{prefix}#{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in _layers)
    _layers[name] = layer
    return name


def _run(x: torch.Tensor, layer: str, rows: int) -> torch.Tensor:
    del rows
    return _layers[layer](x)


def _shape(x: torch.Tensor, layer: str, rows: int) -> torch.Tensor:
    del layer
    return x.new_empty((*x.shape[:-1], rows))


_library.impl("linear", _run, "CPU")
_library.impl("linear", _shape, "Meta")
