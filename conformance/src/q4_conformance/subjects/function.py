"""The subject of functions: a bare function, and what is claimed of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from q4_conformance.outcome import NotDeclaredError
from q4_conformance.subjects.backend import SERVED_BY, BackendLayer, BackendSubject
from q4core import ActivationPrecision, Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from q4core import PackedWeight


@attrs.frozen(eq=False)
class FunctionLayer:
    """A bare function over one weight, as it was given and as it was placed on the function's device."""

    function: Callable[..., torch.Tensor]
    weight: PackedWeight
    placed: PackedWeight
    bias: torch.Tensor | None
    activations: Precision
    approximate: tuple[float, ...] | None
    device: torch.device
    roundings: int

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Call the function."""
        if out is None:
            return self.function(x, self.placed, self.bias)
        return self.function(x, self.placed, self.bias, out=out)

    def precision(self, _rows: int) -> Precision:
        """Return the declared precision."""
        return self.activations

    def codebook(self, _rows: int) -> tuple[float, ...] | None:
        """Return the declared approximation of the codebook."""
        return self.approximate


@attrs.frozen(kw_only=True, eq=False)
class FunctionSubject:
    """A function ``fn(x, weight, bias) -> y`` and what is claimed of it.

    Args:
        function: Takes x [..., K], a ``PackedWeight`` and a bias [N] or None; with ``has_out`` also ``out=``.
        name: For messages.
        precision: In what precision it computes.
        dtypes: dtypes of x.
        codebook: The values that it uses in place of the format's codebook.
        has_out: Whether it takes ``out=``.
        has_gradients: Whether gradients flow to x.
        device: Where x is.
        has_bias: Whether it takes a bias.
        roundings: By dtype of x, how often each weight is rounded to that dtype before it is multiplied; not at all
            where nothing is said. A function that multiplies by a dense weight in x's dtype rounds once.
        limit: Takes a weight and the dtype of x, and returns why the function does not claim to serve them, or None.
    """

    function: Callable[..., torch.Tensor]
    name: str = "function"
    precision: Precision = Precision.W4A32
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    codebook: tuple[float, ...] | None = None
    has_out: bool = False
    has_gradients: bool = False
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=torch.device)
    has_bias: bool = True
    roundings: Mapping[torch.dtype, int] = attrs.field(factory=dict)
    limit: Callable[[PackedWeight, torch.dtype], str | None] | None = None

    def layer(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        precision: ActivationPrecision = ActivationPrecision.EXACT,
        gradients: bool = False,
    ) -> FunctionLayer:
        """Return a layer; raises ``NotDeclaredError`` where the function does not claim to serve such a weight."""
        if dtype not in self.dtypes:
            raise NotDeclaredError(f"dtype {dtype} is not declared")
        if self.precision not in SERVED_BY.get(precision, frozenset(Precision)):
            raise NotDeclaredError(f"activation precision {precision.value!r} is not declared")
        if gradients and not self.has_gradients:
            raise NotDeclaredError("gradients are not declared")
        if bias is not None and not self.has_bias:
            raise NotDeclaredError("a bias is not declared")
        reason = None if self.limit is None else self.limit(weight, dtype)
        if reason is not None:
            raise NotDeclaredError(reason)
        placed = weight.to(self.device)
        roundings = self.roundings.get(dtype, 0)
        return FunctionLayer(self.function, weight, placed, bias, self.precision, self.codebook, self.device, roundings)


Layer = BackendLayer | FunctionLayer
Subject = BackendSubject | FunctionSubject
