"""A right toy layer type, and the faults planted in it."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_conformance_faults.fault import layer_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_KEPT: list[nn.Module] = []


class ToyLayerType:
    """Four features to three; a fault tells another number, or has a hook that changes results."""

    examples = (types.SimpleNamespace(shape=(4,), options={}, integers=None, straight_through=False),)

    def __init__(self, name: str = "toy-layer", told: int = 3, hook: Callable[..., Any] = lambda *_: None) -> None:
        self.name, self._told, self._hook = name, told, hook

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a result."""
        if shape[-1:] != (4,):
            raise ValueError("of shape [..., 4]")
        return (*shape[:-1], self._told)

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


@layer_fault("lies-about-its-shape", "EX-20/shapes", "shape [1, 4], as its shape says, found [1, 3]")
def _lies(name: str) -> ToyLayerType:
    return ToyLayerType(name, told=4)


@layer_fault("differentiates-wrongly", "EX-20/gradients", "a gradient is not what differences show")
def _differentiates(name: str) -> ToyLayerType:
    return ToyLayerType(name, hook=lambda _, __, y: _wrong(y, 2.0))


@layer_fault("keeps-state-to-itself", "EX-20/state", "a new layer with its state gives other numbers")
def _keeps_state(name: str) -> ToyLayerType:
    return ToyLayerType(name, hook=lambda layer, _, y: y * layer.__dict__.setdefault("factor", float(torch.rand(()))))


@layer_fault("climbs-when-it-trains", "EX-20/training", "20 steps took the loss")
def _climbs(name: str) -> ToyLayerType:
    return ToyLayerType(name, hook=lambda layer, _, y: _wrong(y, -1.0) if layer.training else y)


@layer_fault("is-never-let-go", "EX-20/lifetime", "9 of 9 layers live on")
def _stays(name: str) -> ToyLayerType:
    return ToyLayerType(name, hook=lambda layer, *_: _KEPT.append(layer))
