"""Faults at certain sizes and places: tails, tiles, long rows, strides and addresses."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from q4_conformance_faults.boundary import Differentiates
from q4_conformance_faults.fault import LONG, NF4, TAIL, backend_fault, numeric_fault
from q4_conformance_faults.toy import Calls, Floats, Spoils, ToyKernel
from q4core import PackedWeight, Prepared, Support

if TYPE_CHECKING:
    from torch import Tensor

    from q4core import Request

_VECTOR = 8
_TILE = 128
_ROWS = 4096
_LINE = 16
_MANY = 48
_LONG = 8192
_SMALL_TILE = 64


@numeric_fault("one-zeroed-element", "EX-01/rows", "1 of 6144 elements")
class OneZero(Spoils):
    """Zeroes one element where M is 128."""

    def spoil(self, y: Floats) -> None:
        if y.shape[0] == 128:  # noqa: PLR2004  # far from where the probe looks
            y[101, y.shape[1] // 2] = 0


@numeric_fault("forgets-a-corner", "EX-01/shapes", "out_of_bound: 1 of")
class ForgetsCorner(Spoils):
    """Zeroes the last element where M is from 19 to 31 and N is odd."""

    def spoil(self, y: Floats) -> None:
        if 19 <= y.shape[0] < 32 and y.shape[1] % 2:  # noqa: PLR2004  # far from where the probe looks
            y[-1, -1] = 0


class AllZero(Spoils):
    """Gives zeros where M is 17, where a path begins, and the probe looks; or where M is 127, far from there."""

    def __init__(self, name: str, rows: int) -> None:
        super().__init__(name)
        self._rows = rows

    def spoil(self, y: Floats) -> None:
        if len(y) == self._rows:
            y[:] = 0


for _rows, _says in ((17, "probe_failed"), (127, "all_zero")):
    _zero = functools.partial(AllZero, rows=_rows)
    numeric_fault(f"all-zero-for-m-{_rows}", "EX-01/rows", _says, format="q8_0")(_zero)


@backend_fault("wrong-tile-for-many-rows", "EX-01/rows")
class WrongTile(Spoils):
    """Computes with another tile from 200 rows on, which is wrong, and names that number for the probe."""

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        paths = [
            attrs.evolve(path, probe_rows=(200,)) if path.name.startswith("gemm") else path for path in verdict.paths
        ]
        return Support.yes(paths, native_state=verdict.native_state)

    def spoil(self, y: Floats) -> None:
        if y.shape[0] >= 200:  # noqa: PLR2004  # beyond every case, and where the probe looks only on request
            y[:, -1] *= np.float32(1.125)


@backend_fault("adds-bias-by-vectors", f"TC-09/bias/{TAIL}/float32/exact", "out_of_bound")
class BiasByVectors(Calls):
    """Adds the bias by vectors of 8, and not to the columns beyond the last whole one."""

    def bias(self, bias: Tensor) -> Tensor:
        read = bias.clone()
        read[len(read) // _VECTOR * _VECTOR :] = 0
        return read


@backend_fault("reads-bias-from-line", f"TC-09/bias/{NF4}/float32/exact", "non_finite")
class BiasFromLine(Calls):
    """Reads the bias from the multiple of 16 bytes below its address."""

    def bias(self, bias: Tensor) -> Tensor:
        before = min(bias.data_ptr() % _LINE // bias.element_size(), bias.storage_offset())
        return bias.as_strided(bias.shape, (1,), bias.storage_offset() - before)


@backend_fault("stores-by-line", f"TC-09/out/{NF4}/float32/exact", "non_finite")
class StoresByLine(Calls):
    """Leaves as many of the last elements unwritten as ``out`` begins behind a multiple of 16 bytes."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        behind = out.data_ptr() % _LINE // out.element_size()
        if behind:
            out.view(-1)[-behind:] = before.view(-1)[-behind:]


@backend_fault("loses-corner-tile", "EX-01/tiles", "M = 131: out_of_bound")
class LosesCornerTile(Calls):
    """Computes no tile that is beyond the first of 128 both ways."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        out[_TILE:, _TILE:] = 0


@backend_fault("loses-rows-beyond-4096", "EX-01/many", "M = 4099: out_of_bound")
class LosesRowsBeyond4096(Calls):
    """Has a grid for 4,096 rows."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        out[_ROWS:] = 0


@backend_fault("loses-rows-of-64", f"EX-01/rows/{NF4}/float32/exact", "M = 50")
class LosesRowsOf64(Calls):
    """Leaves the last 8 rows out in its code for 49 to 64 of them."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        if 49 <= len(out) <= 64:  # noqa: PLR2004  # as it says
            out[-8:] = 0


@numeric_fault("splits-unevenly", f"EX-01/long/{LONG}/float32/exact")
class SplitsUnevenly(ToyKernel):
    """Splits long rows among 8 by whole blocks, and leaves the rest of these out."""

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        columns = values.shape[1]
        shared = columns // _TILE // _VECTOR * _TILE * _VECTOR if columns >= _ROWS else columns
        return super().accumulate(values[:, :shared], dense[:, :shared])


@backend_fault("reads-through-gaps", f"TC-11/cut/{NF4}/float32/exact")
class ReadsThroughGaps(ToyKernel):
    """Reads scales as if their rows followed one another without a gap."""

    def scales(self, weight: PackedWeight) -> Floats:
        scale = weight.scale
        if not scale.is_contiguous():
            shape = scale.shape
            weight = attrs.evolve(weight, scale=scale.as_strided((shape.numel(),), (1,)).view(shape).clone())
        return super().scales(weight)


@backend_fault("gradient-of-64-rows", f"EX-05/gradient/{TAIL}/float32/exact", "M = 129, gradient")
class GradientOf64Rows(Differentiates):
    """Leaves out what lies beyond 64 rows in its gradient."""

    def input_gradient(self, prepared: Prepared, grad: Tensor, out: Tensor, *, path: str) -> None:
        super().input_gradient(prepared, grad, out, path=path)
        out[64:] = 0


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
        if out.dtype is torch.float16 and len(out) > _SMALL_TILE:
            out[:, -1] = 0


@numeric_fault("cuts-long-rows-in-half", f"EX-01/long/{LONG}/float16/exact")
class CutsLongRowsInHalf(ToyKernel):
    """Leaves out what float16 rows hold beyond 4,096 elements."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        values = super().inputs(weight, x, path)
        if x.dtype is torch.float16 and values.shape[1] > _ROWS:
            values = values.copy()
            values[:, _ROWS:] = 0
        return values


@numeric_fault("drops-rows-beyond-tiles", f"EX-01/rows/{NF4}/float32/exact", "M = 257: out_of_bound")
class DropsRowsBeyondTiles(ToyKernel):
    """Leaves the last row out where many rows are no multiple of 8."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        if len(out) > 2 * _SMALL_TILE + 2 and len(out) % 8:
            out[-1] = 0


@numeric_fault("counts-in-16-bits", "EX-01/wide")
class CountsIn16Bits(ToyKernel):
    """Leaves out what lies beyond 65,536 out-features."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        out[:, 1 << 16 :] = 0


@backend_fault("ignores-out-for-m-5", "TC-09/out", "non_finite")
class WritesNothing(ToyKernel):
    """Forgets to write where M is 5, so that ``out=`` keeps what it held."""

    def write(self, y: Tensor, out: Tensor) -> None:
        if y.shape[0] != 5:  # noqa: PLR2004  # far from where the probe looks
            out.copy_(y)


@backend_fault("pads-with-neighbours", "TC-11/strided", "non_finite")
class PadsWithNeighbours(ToyKernel):
    """Reads one block past the end of each row of x and multiplies it by a weight of zero."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        values = super().inputs(weight, x, path)
        end = x.storage_offset() + (x.shape[0] - 1) * x.stride(0) + x.shape[1]
        if x.untyped_storage().nbytes() // x.element_size() > end:
            next_ = x.as_strided((x.shape[0], 1), (x.stride(0), 1), x.storage_offset() + x.shape[1])
            values = values + next_.to(torch.float32).numpy() * np.float32(0)
        return values


@backend_fault("lies-about-alignment", "TC-11/strided", "M = 1")
class LiesAboutAlignment(ToyKernel):
    """Declares every address, and reads x from the multiple of 16 below it."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        shift = min(x.data_ptr() % 16 // x.element_size(), x.storage_offset())
        aligned = x.as_strided(x.shape, x.stride(), x.storage_offset() - shift)
        return super().inputs(weight, aligned, path)
