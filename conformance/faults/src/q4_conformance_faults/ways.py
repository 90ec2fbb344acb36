"""Backends that are right wherever one usually looks.

Wrong on one path, in one dtype, at sizes as large models have, in inference mode, or with other numbers of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance_faults.fault import Fault
from q4_conformance_faults.toy import ToyKernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4core import PackedWeight, Prepared, Request, Support

__all__ = ["WAY_FAULTS"]

_MANY = 48
_LONG = 8192
_TILE = 64
_ROW = 4096
_SEVERAL = 3


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

    def check(self, request: Request) -> Support:
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


class LosesLastColumnInHalf(ToyKernel):
    """Leaves the last column out where many rows are float16."""

    def write(self, y: torch.Tensor, out: torch.Tensor) -> None:
        super().write(y, out)
        if out.dtype is torch.float16 and len(out) > _TILE:
            out[:, -1] = 0


class ForgetsBiasInHalfInt8(ToyKernel):
    """Adds no bias where float16 activations are taken as int8."""

    def linear(
        self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None, path: str
    ) -> None:
        is_wrong = x.dtype is torch.float16 and path == "dot_w4a8"
        super().linear(prepared, x, out, bias=None if is_wrong else bias, path=path)


class CutsLongRowsInHalf(ToyKernel):
    """Leaves out what float16 rows hold beyond 4,096 elements."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        values = super().inputs(weight, x, path)
        if x.dtype is torch.float16 and values.shape[1] > _ROW:
            values = values.copy()
            values[:, _ROW:] = 0
        return values


class DropsRowsBeyondTiles(ToyKernel):
    """Leaves the last row out where many rows are no multiple of 8."""

    def write(self, y: torch.Tensor, out: torch.Tensor) -> None:
        super().write(y, out)
        if len(out) > 2 * _TILE + 2 and len(out) % 8:
            out[-1] = 0


class CountsIn16Bits(ToyKernel):
    """Leaves out what lies beyond 65,536 out-features."""

    def write(self, y: torch.Tensor, out: torch.Tensor) -> None:
        super().write(y, out)
        out[:, 1 << 16 :] = 0


class ForgetsBiasInInference(ToyKernel):
    """Adds no bias in inference mode."""

    def linear(
        self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None, path: str
    ) -> None:
        super().linear(prepared, x, out, bias=None if torch.is_inference_mode_enabled() else bias, path=path)


class AsksForVersions(ToyKernel):
    """Keeps the input's version, which tensors made in inference mode do not have."""

    def linear(
        self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None, path: str
    ) -> None:
        self.seen = x._version  # noqa: SLF001  # as kernels that cache their inputs do
        super().linear(prepared, x, out, bias=bias, path=path)


class LosesRestAmongThreads(ToyKernel):
    """Shares the columns evenly among three and more threads, and leaves the rest to nobody."""

    def write(self, y: torch.Tensor, out: torch.Tensor) -> None:
        super().write(y, out)
        count = torch.get_num_threads()
        if count >= _SEVERAL:
            out[:, out.shape[1] // count * count :] = 0


_INT8 = "nf4-plain-high_first-48x256b64-s0/float32/int8"
_EXACT = "nf4-plain-high_first-48x256b64-s0/float32/exact"
_HALF = "nf4-plain-high_first-48x256b64-s0/float16/exact"
_HALF_INT8 = "nf4-plain-high_first-48x256b64-s0/float16/int8"
_LONG_HALF = "nf4-plain-high_first-8x14400b64-s0/float16/exact"
_LONG_ROWS = "nf4-plain-high_first-8x14400b64-s0/float32/exact"
_WITH_CORE: dict[str, Any] = {"is_numeric": False}
_SEEN_BY_PROBE: dict[str, Any] = {"passes_probe": False}
"""Where it is the first weight of its kind in a process; after shorter ones the case itself sees it."""

WAY_FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=f"fault-{name}", make=make, format="nf4", caught_by=case, says=says, **facts)
    for name, make, case, says, facts in (
        ("forgets-bias-in-int8", ForgetsBiasInInt8, f"TC-09/bias/{_INT8}", "out_of_bound", _WITH_CORE),
        ("silences-nan-in-int8", SilencesNanInInt8, f"EX-10/non-finite/{_INT8}", "finite numbers", _WITH_CORE),
        ("forgets-bias-of-many-rows", ManyRows, f"TC-09/bias/{_EXACT}", "M = 48: out_of_bound", _WITH_CORE),
        ("loses-last-column-in-half", LosesLastColumnInHalf, f"EX-01/rows/{_HALF}", "out_of_bound", {}),
        ("forgets-bias-in-half-int8", ForgetsBiasInHalfInt8, f"TC-09/bias/{_HALF_INT8}", "out_of_bound", _WITH_CORE),
        ("cuts-long-rows-in-half", CutsLongRowsInHalf, f"EX-01/long/{_LONG_HALF}", "probe_failed", _SEEN_BY_PROBE),
        ("drops-rows-beyond-tiles", DropsRowsBeyondTiles, f"EX-01/rows/{_EXACT}", "M = 257: out_of_bound", {}),
        ("counts-in-16-bits", CountsIn16Bits, "EX-01/wide", "probe_failed", _SEEN_BY_PROBE),
        ("forgets-bias-in-inference", ForgetsBiasInInference, f"EX-03/inference/{_EXACT}", "inference_mode", {}),
        ("asks-for-versions", AsksForVersions, f"EX-03/inference/{_EXACT}", "version", {}),
        ("loses-rest-among-threads", LosesRestAmongThreads, "EX-04/counts", "3 threads", {}),
        ("gives-up-on-long-rows", GivesUpOnLongRows, f"EX-01/long/{_LONG_ROWS}", "probe_failed", _SEEN_BY_PROBE),
    )
)
