"""Bare functions with faults that the core does not let a backend make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance_faults.toy import ToyKernel, function_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4core import PackedWeight

__all__ = ["FUNCTION_FAULTS", "FunctionFault"]


def _float32_always(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, **out: Any) -> torch.Tensor:
    del out
    return function_of(ToyKernel())(x.to(torch.float32), weight, bias)


def _ignores_out(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    y = function_of(ToyKernel())(x, weight, bias)
    return y if out is None else out


def _forgets_leading(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, **out: Any) -> torch.Tensor:
    return function_of(ToyKernel())(x.reshape(-1, x.shape[-1]), weight, bias, **out)


def _drops_gradients(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, **out: Any) -> torch.Tensor:
    return function_of(ToyKernel())(x.detach(), weight, bias, **out)


def _zero_gradients(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, **out: Any) -> torch.Tensor:
    y = function_of(ToyKernel())(x.detach(), weight, bias, **out)
    return y + (x * 0).sum().to(y.dtype) if x.requires_grad else y


@attrs.frozen(kw_only=True)
class FunctionFault:
    """A fault that only a bare function can have: the core does not let a backend make it.

    Args:
        name: Its name.
        function: The function.
        caught_by: How the id of the case starts that is meant to catch it.
        says: A part of that case's message.
    """

    name: str
    function: Callable[..., torch.Tensor]
    caught_by: str
    says: str


FUNCTION_FAULTS: tuple[FunctionFault, ...] = tuple(
    FunctionFault(name=name, function=function, caught_by=case, says=says)
    for name, function, case, says in (
        ("wrong-out-dtype", _float32_always, "TC-09/values", "must be torch.bfloat16, got torch.float32"),
        ("ignores-out", _ignores_out, "TC-09/out", "non_finite"),
        ("forgets-leading-dimensions", _forgets_leading, "TC-09/leading", "gave"),
        ("drops-gradients", _drops_gradients, "EX-05/gradient", "does not require gradients"),
        ("zero-gradients", _zero_gradients, "EX-05/gradient", "all_zero"),
    )
)
