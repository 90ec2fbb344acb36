"""A right toy layer type, and the faults planted in it."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_conformance_faults.fault import layer_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_HELD: list[nn.Module] = []


class ToyLayerType:
    """Four features to three; a fault claims another number, or has a hook that changes results."""

    examples = (types.SimpleNamespace(shape=(4,), options={}, integers=None, straight_through=False),)

    def __init__(self, name: str = "toy-layer", claimed: int = 3, hook: Callable[..., Any] = lambda *_: None) -> None:
        self.name, self._claimed, self._hook = name, claimed, hook

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a result."""
        if shape[-1:] != (4,):
            raise ValueError("of shape [..., 4]")
        return (*shape[:-1], self._claimed)

    def make(self) -> nn.Module:
        """Return a layer."""
        made = nn.Linear(4, 3)
        made.register_forward_hook(self._hook)
        return made


class _Wrong(torch.autograd.Function):
    """The identity, with the gradient of another function."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


_wrong: Any = _Wrong.apply


def _scaled(layer: nn.Module, _: object, y: Tensor) -> Tensor:
    """Return what a layer multiplies by a number that it stores, and does not save."""
    factor: float = layer.__dict__.setdefault("factor", float(torch.rand(())))
    return y * factor


def _reversed(layer: nn.Module, _: object, y: Tensor) -> Any:
    return _wrong(y, -1.0) if layer.training else y


for _name, _part, _says, _facts in (
    ("lies-about-its-shape", "shapes", "shape [1, 4], as its shape says, found [1, 3]", {"claimed": 4}),
    ("differentiates-wrongly", "gradients", "not what differences show", {"hook": lambda _, __, y: _wrong(y, 2.0)}),
    ("keeps-state-to-itself", "state", "a new layer with its state gives other numbers", {"hook": _scaled}),
    ("climbs-when-it-trains", "training", "20 steps took the loss", {"hook": _reversed}),
    ("is-never-let-go", "lifetime", "9 of 9 layers live on", {"hook": lambda layer, *_: _HELD.append(layer)}),
):
    layer_fault(_name, f"EX-20/{_part}", _says)(functools.partial(ToyLayerType, **_facts))
