"""Backends that are right wherever one usually looks.

Wrong on one path, in one dtype, at sizes as large models have, in inference mode, or with other numbers of threads.
"""
# ruff: noqa: ARG005, D102 - some look at some of what they are given; ToyKernel documents what is overridden

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from q4_conformance_faults.fault import LONG, NF4, backend_fault, numeric_fault
from q4_conformance_faults.toy import Floats, ToyKernel
from q4core import KernelPath, PathKind, Precision, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from q4core import PackedWeight, Prepared, Request, Support

_MANY = 48
_LONG = 8192
_TILE = 64
_ROW = 4096
_SEVERAL = 3


class ForgetsBias(ToyKernel):
    """Adds no bias in the calls that ``when`` chooses."""

    def __init__(self, name: str, when: Callable[[Tensor, str], bool]) -> None:
        super().__init__(name)
        self._when = when

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x, out, bias=None if self._when(x, path) else bias, path=path)


_FORGETS: dict[tuple[str, str, str], Callable[[Tensor, str], bool]] = {
    ("int8", f"TC-09/bias/{NF4}/float32/int8", "out_of_bound"): lambda x, path: path == "dot_w4a8",
    ("half-int8", f"TC-09/bias/{NF4}/float16/int8", "out_of_bound"): lambda x, path: (
        x.dtype is torch.float16 and path == "dot_w4a8"
    ),
    ("inference", f"EX-03/inference/{NF4}/float32/exact", "inference_mode"): lambda x, path: (
        torch.is_inference_mode_enabled()
    ),
}
for (_name, _case, _says), _when in _FORGETS.items():
    _fault = numeric_fault if _name == "inference" else backend_fault
    _fault(f"forgets-bias-in-{_name}", _case, _says)(functools.partial(ForgetsBias, when=_when))


@backend_fault("silences-nan-in-int8", f"EX-10/non-finite/{NF4}/float32/int8", "finite numbers")
class SilencesNanInInt8(ToyKernel):
    """Takes what is not finite for zero where the activations are int8."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return super().inputs(weight, torch.nan_to_num(x, 0, 0, 0) if path == "dot_w4a8" else x, path)


@backend_fault("takes-int16-for-int8", f"TC-09/values/{NF4}/bfloat16/int16")
class TakesInt16ForInt8(ToyKernel):
    """Has a path for int16 activations, and rounds them to int8 there."""

    def __init__(self, name: str) -> None:
        super().__init__(name, precisions={Precision.W4A32, Precision.W4A16, Precision.W4A8, Precision.W4I16})

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        path = KernelPath("dot_w4i16", (1, None), PathKind.KERNEL, Precision.W4I16, Tier.TUNED)
        return attrs.evolve(verdict, paths=(*verdict.paths, path))

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return super().inputs(weight, x, "dot_w4a8" if path == "dot_w4i16" else path)


@backend_fault("forgets-bias-of-many-rows", f"TC-09/bias/{NF4}/float32/exact", "M = 48: out_of_bound")
class ManyRows(ToyKernel):
    """Has a path of its own for 48 rows and more, and adds no bias there."""

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        gemv, gemm, *others = verdict.paths
        few = attrs.evolve(gemm, m=(gemm.m[0], _MANY - 1))
        many = attrs.evolve(gemm, name=f"many_{gemm.precision.value}", m=(_MANY, None))
        return attrs.evolve(verdict, paths=(gemv, few, many, *others))

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x, out, bias=None if path.startswith("many") else bias, path=path)


@numeric_fault("gives-up-on-long-rows", f"EX-01/long/{LONG}/float32/exact")
class GivesUpOnLongRows(ToyKernel):
    """Gives zeros where a row has more elements than its scratch would hold."""

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        y = super().accumulate(values, dense)
        return y if values.shape[1] <= _LONG else np.zeros_like(y)


@numeric_fault("loses-last-column-in-half", f"EX-01/rows/{NF4}/float16/exact", "out_of_bound")
class LosesLastColumnInHalf(ToyKernel):
    """Leaves the last column out where many rows are float16."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        if out.dtype is torch.float16 and len(out) > _TILE:
            out[:, -1] = 0


@numeric_fault("cuts-long-rows-in-half", f"EX-01/long/{LONG}/float16/exact")
class CutsLongRowsInHalf(ToyKernel):
    """Leaves out what float16 rows hold beyond 4,096 elements."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        values = super().inputs(weight, x, path)
        if x.dtype is torch.float16 and values.shape[1] > _ROW:
            values = values.copy()
            values[:, _ROW:] = 0
        return values


@numeric_fault("drops-rows-beyond-tiles", f"EX-01/rows/{NF4}/float32/exact", "M = 257: out_of_bound")
class DropsRowsBeyondTiles(ToyKernel):
    """Leaves the last row out where many rows are no multiple of 8."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        if len(out) > 2 * _TILE + 2 and len(out) % 8:
            out[-1] = 0


@numeric_fault("counts-in-16-bits", "EX-01/wide")
class CountsIn16Bits(ToyKernel):
    """Leaves out what lies beyond 65,536 out-features."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        out[:, 1 << 16 :] = 0


@numeric_fault("asks-for-versions", f"EX-03/inference/{NF4}/float32/exact", "version")
class AsksForVersions(ToyKernel):
    """Keeps the input's version, which tensors made in inference mode do not have."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        self.seen = x._version  # noqa: SLF001  # as kernels that cache their inputs do
        super().linear(prepared, x, out, bias=bias, path=path)


@numeric_fault("loses-rest-among-threads", "EX-04/counts", "3 threads")
class LosesRestAmongThreads(ToyKernel):
    """Shares the columns evenly among three and more threads, and leaves the rest to nobody."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        count = torch.get_num_threads()
        if count >= _SEVERAL:
            out[:, out.shape[1] // count * count :] = 0
