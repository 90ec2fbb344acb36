"""Surrogate gradients: a step forward and a smooth slope backward, as snnTorch defines them."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Surrogate", "atan", "fast_sigmoid", "sigmoid", "straight_through"]


class _Step(torch.autograd.Function):
    """0 or 1 forward, a surrogate's slope backward."""

    @staticmethod
    def forward(shift: torch.Tensor, slope: Callable[[torch.Tensor], torch.Tensor], inclusive: bool) -> torch.Tensor:  # noqa: FBT001  # apply takes no names
        del slope
        return (shift >= 0 if inclusive else shift > 0).to(shift.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        del output
        ctx.save_for_backward(inputs[0])
        ctx.slope = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (shift,) = ctx.saved_tensors
        return grad * ctx.slope(shift), None, None


@attrs.frozen
class Surrogate:
    """A spike function with the slope that training sees.

    Args:
        slope: Takes the membrane's distance from the threshold, and returns dS/dU there.
    """

    slope: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, shift: torch.Tensor, *, inclusive: bool = False) -> torch.Tensor:
        """Return 1 where ``shift`` is above 0 (or is 0, where inclusive), else 0, of its dtype."""
        if not torch.is_grad_enabled():  # a third of what autograd's function costs, and no bool is made
            return (torch.ge if inclusive else torch.gt)(shift, 0, out=torch.empty_like(shift))
        spikes: torch.Tensor = _Step.apply(shift, self.slope, inclusive)  # type: ignore[no-untyped-call]  # torch's
        return spikes


def _fast_sigmoid(shift: torch.Tensor, slope: float) -> torch.Tensor:
    return (slope * shift.abs() + 1.0) ** -2


def fast_sigmoid(slope: float = 25.0) -> Surrogate:
    """Return the surrogate dS/dU = 1 / (1 + slope · |U|)².

    Reference:
        Zenke and Ganguli, SuperSpike: Supervised Learning in Multilayer Spiking Neural Networks, 2018.
    """
    return _with(_fast_sigmoid, "slope", slope)


def _atan(shift: torch.Tensor, alpha: float) -> torch.Tensor:
    return alpha / 2 / (1 + (torch.pi / 2 * alpha * shift) ** 2)


def atan(alpha: float = 2.0) -> Surrogate:
    """Return the surrogate dS/dU = (alpha / 2) / (1 + (π / 2 · alpha · U)²).

    Reference:
        Fang et al., Incorporating Learnable Membrane Time Constants to Enhance Learning of Spiking Networks, 2021.
    """
    return _with(_atan, "alpha", alpha)


def _sigmoid(shift: torch.Tensor, slope: float) -> torch.Tensor:
    level = torch.sigmoid(slope * shift)
    return slope * level * (1 - level)


def _with(function: Callable[..., torch.Tensor], name: str, value: float) -> Surrogate:
    """Return a surrogate of one number, which does not learn."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError("surrogate", name=name, rule="a finite number", value=value)
    return Surrogate(functools.partial(function, **{name: value}))


def sigmoid(slope: float = 25.0) -> Surrogate:
    """Return the surrogate dS/dU = slope · σ(slope · U) · (1 - σ(slope · U))."""
    return _with(_sigmoid, "slope", slope)


def straight_through() -> Surrogate:
    """Return the surrogate dS/dU = 1."""
    return Surrogate(torch.ones_like)
