"""Backends that are right wherever one usually looks: wrong on one path, or in rows as long as large models have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance.zoo.fault import Fault
from q4_conformance.zoo.toy import ToyKernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4core import PackedWeight, Prepared, Request, Verdict

__all__ = ["WAY_FAULTS"]

_MANY = 48
_LONG = 8192


class ForgetsBiasInInt8(ToyKernel):
    """Adds no bias where the activations are int8."""

    def linear(
        self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None, path: str
    ) -> None:
        super().linear(prepared, x, out, bias=None if path == "dot_w4a8" else bias, path=path)


class SilencesNanInInt8(ToyKernel):
    """Takes what is not finite for zero where the activations are int8."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        return super().inputs(weight, torch.nan_to_num(x, 0, 0, 0) if path == "dot_w4a8" else x, path)


class ManyRows(ToyKernel):
    """Has a path of its own for 48 rows and more, and adds no bias there."""

    def check(self, request: Request) -> Verdict:
        verdict = super().check(request)
        gemv, gemm, *others = verdict.paths
        few = attrs.evolve(gemm, m=(gemm.m[0], _MANY - 1))
        many = attrs.evolve(gemm, name=f"many_{gemm.precision.value}", m=(_MANY, None))
        return attrs.evolve(verdict, paths=(gemv, few, many, *others))

    def linear(
        self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None, path: str
    ) -> None:
        super().linear(prepared, x, out, bias=None if path.startswith("many") else bias, path=path)


class GivesUpOnLongRows(ToyKernel):
    """Gives zeros where a row has more elements than its scratch would hold."""

    def accumulate(self, values: NDArray[np.float32], dense: NDArray[np.float32]) -> NDArray[np.float32]:
        y = super().accumulate(values, dense)
        return y if values.shape[1] <= _LONG else np.zeros_like(y)


_INT8 = "nf4-plain-high_first-48x256b64-s0/float32/int8"
_EXACT = "nf4-plain-high_first-48x256b64-s0/float32/exact"
_LONG_ROWS = "nf4-plain-high_first-8x14336b64-s0/float32/exact"
_WITH_CORE: dict[str, Any] = {"is_numeric": False}
_SEEN_BY_PROBE: dict[str, Any] = {"passes_probe": False}
"""Where it is the first weight of its kind in a process; after shorter ones the case itself sees it."""

WAY_FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=f"fault-{name}", make=make, format="nf4", caught_by=case, says=says, **facts)
    for name, make, case, says, facts in (
        ("forgets-bias-in-int8", ForgetsBiasInInt8, f"TC-09/bias/{_INT8}", "out_of_bound", _WITH_CORE),
        ("silences-nan-in-int8", SilencesNanInInt8, f"EX-10/non-finite/{_INT8}", "finite numbers", _WITH_CORE),
        ("forgets-bias-of-many-rows", ManyRows, f"TC-09/bias/{_EXACT}", "M = 48: out_of_bound", _WITH_CORE),
        ("gives-up-on-long-rows", GivesUpOnLongRows, f"EX-01/long/{_LONG_ROWS}", "probe_failed", _SEEN_BY_PROBE),
    )
)
