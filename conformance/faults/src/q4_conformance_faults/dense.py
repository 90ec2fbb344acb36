"""Backends that say KERNEL and make a dense weight all the same: in each call, or in some."""
# ruff: noqa: D102 - what is overridden is documented in ToyKernel

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from q4_conformance_faults.toy import ToyKernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from q4core import PackedWeight

_ROWS = 16
"""So few that what is made of them at a time is far below every limit."""
_MANY = 64
_VERY_MANY = 200
_CALLS = 10


class DensePython(ToyKernel):
    """Dequantises slice by slice in torch, and keeps every slice until the product."""

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        del path
        weight = self.weight(prepared)
        scales = prepared.tensors[-1].numpy()
        slices_ = [torch.from_numpy(self.rows(weight, scales, *ends)).clone() for ends in slices(weight)]
        y = torch.cat([x.to(torch.float32) @ dense.T for dense in slices_], dim=1)
        out.copy_(y if bias is None else y + bias)


class LevelsPython(ToyKernel):
    """Unpacks every code into a byte of its own in torch, before the first is used."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        levels = [torch.from_numpy(self.codes(weight, *ends)).clone() for ends in slices(weight)]
        y = super().product(weight, scales, x, path)
        del levels
        return y


class DenseNative(ToyKernel):
    """Dequantises the whole weight in each call where torch does not see it."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        return self.accumulate(self.inputs(weight, x, path), self.dense(weight, scales))

    def dense(self, weight: PackedWeight, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the weight, float32 [N, K]."""
        return self.filled(weight, scales, np.empty(weight.shape, np.float32))

    def filled(
        self, weight: PackedWeight, scales: NDArray[np.float32], area: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Write the weight to a place, and return that."""
        for start, stop in slices(weight):
            area[start:stop] = self.rows(weight, scales, start, stop)
        return area


def slices(weight: PackedWeight) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of a few rows at a time."""
    for start in range(0, weight.out_features, _ROWS):
        yield start, min(start + _ROWS, weight.out_features)


class DenseHalves(ToyKernel):
    """Makes the whole weight in bfloat16 in each call where torch does not see it."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        area = np.empty(weight.shape, np.uint16)
        for start, stop in slices(weight):
            area[start:stop] = self.rows(weight, scales, start, stop).view(np.uint32) >> 16
        return super().product(weight, scales, x, path)


class DenseLevels(ToyKernel):
    """Makes a byte of each code of the whole weight in each call where torch does not see it."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        area = np.empty(weight.shape, np.uint8)
        for start, stop in slices(weight):
            area[start:stop] = self.codes(weight, start, stop)
        return super().product(weight, scales, x, path)


class DenseForInt8(DenseNative):
    """Dequantises the whole weight where it multiplies int8 activations alone."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        if path == "dot_w4a8":
            return super().product(weight, scales, x, path)
        return ToyKernel.product(self, weight, scales, x, path)


class DenseForBfloat16(DenseNative):
    """Dequantises the whole weight where x is bfloat16 alone."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        if x.dtype is torch.bfloat16:
            return super().product(weight, scales, x, path)
        return ToyKernel.product(self, weight, scales, x, path)


class DenseForMany(DenseNative):
    """Dequantises the whole weight where x has many rows alone."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        if x.shape[0] >= _MANY:
            return super().product(weight, scales, x, path)
        return ToyKernel.product(self, weight, scales, x, path)


class DenseForVeryMany(DenseNative):
    """Dequantises the whole weight where x has more rows than most look at."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        if x.shape[0] >= _VERY_MANY:
            return super().product(weight, scales, x, path)
        return ToyKernel.product(self, weight, scales, x, path)


class LevelsForMany(DenseLevels):
    """Makes a byte of each code where x is so large that its copies would be larger."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        if x.shape[0] >= 2 * _MANY and path != "dot_w4a8":
            return super().product(weight, scales, x, path)
        return ToyKernel.product(self, weight, scales, x, path)


class Counts(ToyKernel):
    """Knows how often it computed with a weight and a number of rows."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._calls: dict[tuple[int, int, str], int] = {}

    def is_hot(self, scales: NDArray[np.float32], rows: int, path: str) -> bool:
        """Count one more call of a weight with so many rows, and say whether there were many."""
        what = (scales.__array_interface__["data"][0], rows, path)
        self._calls[what] = self._calls.get(what, 0) + 1
        return self._calls[what] >= _CALLS


class DenseWhenHot(Counts, DenseNative):
    """Dequantises the whole weight in each call from the tenth on."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        if self.is_hot(scales, x.shape[0], path):
            return super().product(weight, scales, x, path)
        return ToyKernel.product(self, weight, scales, x, path)
