"""The subject of layer types: one of the hook ``q4_layers``, by layers of its own examples."""

from __future__ import annotations

from typing import Any

import torch

from q4_conformance.outcome import FailureError
from q4core import default_registry

_WAY_OUT = "examples to judge it by; give it examples=(q4_nn.LayerExample(shape, options),)"


class LayerSubject:
    """A layer type, itself or the name of an installed one: with ``name``, ``make``, ``shape`` and ``examples``.

    Raises:
        LookupError: No layer type of that name is installed.
        FailureError: It is no layer type.
    """

    def __init__(self, layer_type: Any) -> None:
        if isinstance(layer_type, str):
            layer_type = default_registry().items("q4_layers")[layer_type]
        lacking = [name for name in ("name", "make", "shape") if not hasattr(layer_type, name)]
        if lacking:
            raise FailureError(f"a layer type must have {', '.join(lacking)}, got {layer_type!r}")
        self.layer_type = layer_type
        self.name: str = layer_type.name
        builder = getattr(layer_type, "build", None)
        is_of_torch = str(getattr(builder, "__module__", "torch")).partition(".")[0] in {"torch", "functools"}
        self.package: str = (type(layer_type) if is_of_torch else builder).__module__
        """Where its source is: with who builds the layers, but where torch does."""
        self.examples: tuple[Any, ...] = tuple(getattr(layer_type, "examples", ()))
        self.lacks = "" if self.examples else _WAY_OUT

    def make(self, example: Any) -> torch.nn.Module:
        """Return the layer of an example."""
        made: torch.nn.Module = self.layer_type.make(**example.options)
        return made

    def draw(self, example: Any, batch: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a batch of inputs of a shape."""
        sizes = (batch, *shape)
        return torch.randn(sizes) if example.integers is None else torch.randint(example.integers, sizes)

    def call(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return a layer's result, the first where it has several; ``FailureError`` where that is no tensor."""
        y: object = module(x)
        first = y[0] if isinstance(y, (tuple, list)) and y else y
        if not isinstance(first, torch.Tensor):
            raise FailureError(f"the result must be a tensor, or begin with one, got {type(first).__name__}")
        return first
