"""Backends that say KERNEL and make a dense weight all the same: in each call, or in some."""
# ruff: noqa: ARG002, ARG005, D102 - each looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from q4_conformance_faults.fault import backend_fault
from q4_conformance_faults.toy import Floats, ToyKernel
from q4core import dequantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from q4core import PackedWeight, Prepared

_ROWS = 16
"""So few that what is made of them at a time is far below every limit."""
_MANY = 64
_VERY_MANY = 200
_CALLS = 10


@backend_fault("hidden-dense-in-torch", "EX-14/kind", "alive at once")
class DensePython(ToyKernel):
    """Dequantises slice by slice in torch, and keeps every slice until the product."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        weight = self.weight(prepared)
        scales = prepared.tensors[-1].numpy()
        slices_ = [torch.from_numpy(self.rows(weight, scales, *ends)).clone() for ends in slices(weight)]
        y = torch.cat([x.to(torch.float32) @ dense.T for dense in slices_], dim=1)
        out.copy_(y if bias is None else y + bias)


@backend_fault("hidden-levels-in-torch", "EX-14/kind", "alive at once")
class LevelsPython(ToyKernel):
    """Unpacks every code into a byte of its own in torch, before the first is used."""

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        levels = [torch.from_numpy(self.codes(weight, *ends)).clone() for ends in slices(weight)]
        y = super().product(weight, scales, x, path)
        del levels
        return y


class DenseNative(ToyKernel):
    """Dequantises the whole weight where torch does not see it: in each call, or in those that ``when`` chooses."""

    def __init__(self, name: str, when: Callable[[Tensor, str], bool] = lambda x, path: True) -> None:
        super().__init__(name)
        self._when = when

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        if not self.is_dense(scales, x, path):
            return super().product(weight, scales, x, path)
        return self.accumulate(self.inputs(weight, x, path), self.dense(weight, scales))

    def is_dense(self, scales: Floats, x: Tensor, path: str) -> bool:
        """Say whether a call is one of those."""
        return self._when(x, path)

    def dense(self, weight: PackedWeight, scales: Floats) -> Floats:
        """Return the weight, float32 [N, K]."""
        return self.filled(weight, scales, np.empty(weight.shape, np.float32))

    def filled(self, weight: PackedWeight, scales: Floats, area: Floats) -> Floats:
        """Write the weight to a place, and return that."""
        for start, stop in slices(weight):
            area[start:stop] = self.rows(weight, scales, start, stop)
        return area


def slices(weight: PackedWeight) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of a few rows at a time."""
    for start in range(0, weight.out_features, _ROWS):
        yield start, min(start + _ROWS, weight.out_features)


@backend_fault("hidden-dense-in-halves", "EX-14/kind", "memory peaked")
class DenseHalves(ToyKernel):
    """Makes the whole weight in bfloat16 in each call where torch does not see it."""

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        area = np.empty(weight.shape, np.uint16)
        for start, stop in slices(weight):
            area[start:stop] = self.rows(weight, scales, start, stop).view(np.uint32) >> 16
        return super().product(weight, scales, x, path)


@backend_fault("hidden-dense-levels", "EX-14/kind", "memory peaked")
class DenseLevels(DenseNative):
    """Makes a byte of each code of the whole weight in those calls where torch does not see it."""

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        if self.is_dense(scales, x, path):
            area = np.empty(weight.shape, np.uint8)
            for start, stop in slices(weight):
                area[start:stop] = self.codes(weight, start, stop)
        return ToyKernel.product(self, weight, scales, x, path)


_CHOSEN: dict[tuple[str, str], Callable[[Tensor, str], bool]] = {
    ("native", "memory peaked"): lambda x, path: True,
    ("for-int8", "dot_w4a8, M = 1: memory peaked"): lambda x, path: path == "dot_w4a8",
    ("for-bfloat16", "gemv_w4a16, M = 1: memory peaked"): lambda x, path: x.dtype is torch.bfloat16,
    ("for-many-rows", "M = 64: memory peaked"): lambda x, path: len(x) >= _MANY,
    ("for-very-many-rows", "M = 257: memory peaked"): lambda x, path: len(x) >= _VERY_MANY,
}
for (_name, _says), _when in _CHOSEN.items():
    backend_fault(f"hidden-dense-{_name}", "EX-14/kind", _says)(functools.partial(DenseNative, when=_when))


backend_fault("hidden-levels-for-many-rows", "EX-14/kind", "memory peaked")(
    functools.partial(DenseLevels, when=lambda x, path: len(x) >= 2 * _MANY and path != "dot_w4a8")
)


class Counts(ToyKernel):
    """Knows how often it computed with a weight and a number of rows."""

    def is_hot(self, scales: Floats, rows: int, path: str) -> bool:
        """Count one more call of a weight with so many rows, and say whether there were many."""
        what = (scales.__array_interface__["data"][0], rows, path)
        self.held[what] = self.held.get(what, 0) + 1
        return bool(self.held[what] >= _CALLS)


@backend_fault("hidden-dense-when-hot", "EX-14/kind", "memory peaked")
class DenseWhenHot(Counts, DenseNative):
    """Dequantises the whole weight in each call from the tenth on."""

    def is_dense(self, scales: Floats, x: Tensor, path: str) -> bool:
        return self.is_hot(scales, len(x), path)


@backend_fault("hidden-fallback", "EX-14/kind", "alive at once")
class HiddenFallback(ToyKernel):
    """Says KERNEL, and leaves the work to the core's own decoder and torch's matmul."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        y = x.to(torch.float32) @ dequantize(self.weight(prepared), torch.float32).T
        out.copy_(y if bias is None else y + bias)
