"""Backends that say KERNEL and hold a dense weight all the same: in each call, from ``prepare`` on, or out of sight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from q4_conformance.zoo.fault import Fault
from q4_conformance.zoo.toy import ToyKernel
from q4core import Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from q4core import PackedWeight, PrepareContext, Request

__all__ = ["DENSE_FAULTS"]

_ROWS = 64
_MANY = 64


class DensePython(ToyKernel):
    """Dequantises slice by slice in torch."""

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        del path
        weight = self.weight(prepared)
        scales = prepared.tensors[-1].numpy()
        values = x.to(torch.float32)
        for start in range(0, weight.out_features, _ROWS):
            stop = min(start + _ROWS, weight.out_features)
            dense = torch.from_numpy(self.rows(weight, scales, start, stop)).clone()
            y = values @ dense.T
            out[:, start:stop] = y if bias is None else y + bias[start:stop]


class LevelsPython(ToyKernel):
    """Unpacks every code into a byte of its own in torch, slice by slice."""

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        levels: NDArray[np.uint8] = torch.from_numpy(super().codes(weight, start, stop)).clone().numpy()
        return levels


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
        for start, stop in _slices(weight):
            area[start:stop] = self.rows(weight, scales, start, stop)
        return area


def _slices(weight: PackedWeight) -> Iterator[tuple[int, int]]:
    for start in range(0, weight.out_features, _ROWS):
        yield start, min(start + _ROWS, weight.out_features)


class DenseHalves(ToyKernel):
    """Makes the whole weight in bfloat16 in each call where torch does not see it."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        area = np.empty(weight.shape, np.uint16)
        for start, stop in _slices(weight):
            area[start:stop] = self.rows(weight, scales, start, stop).view(np.uint32) >> 16
        return super().product(weight, scales, x, path)


class DenseLevels(ToyKernel):
    """Makes a byte of each code of the whole weight in each call where torch does not see it."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        area = np.empty(weight.shape, np.uint8)
        for start, stop in _slices(weight):
            area[start:stop] = self.codes(weight, start, stop)
        return super().product(weight, scales, x, path)


class DenseScratch(DenseNative):
    """Dequantises into memory that it took for the largest weight so far, and keeps."""

    _scratch: NDArray[np.float32] | None = None

    def dense(self, weight: PackedWeight, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        size = weight.out_features * weight.in_features
        if self._scratch is None or self._scratch.size < size:
            self._scratch = np.empty(size, np.float32)
        return self.filled(weight, scales, self._scratch[:size].reshape(weight.shape))


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


class KeepsHalves(ToyKernel):
    """Keeps the weight in bfloat16 beside the packed one, among its prepared tensors."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        plain = super().prepare(weight, request, context)
        rows = self.rows(weight, plain.tensors[-1].numpy(), 0, weight.out_features)
        return Prepared((torch.from_numpy(rows).to(torch.bfloat16), *plain.tensors), plain.meta)

    def weight(self, prepared: Prepared) -> PackedWeight:
        return super().weight(Prepared(prepared.tensors[1:], prepared.meta))


class KeepsLevels(ToyKernel):
    """Keeps a byte of each code beside the packed ones, among its prepared tensors."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        plain = super().prepare(weight, request, context)
        levels = torch.from_numpy(self.codes(weight, 0, weight.out_features))
        return Prepared((levels, *plain.tensors), plain.meta)

    def weight(self, prepared: Prepared) -> PackedWeight:
        return super().weight(Prepared(prepared.tensors[1:], prepared.meta))


class HidesDense(DenseNative):
    """Dequantises the whole weight when it prepares, and keeps it where only it knows."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: dict[int, NDArray[np.float32]] = {}

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        self._kept[prepared.tensors[-1].data_ptr()] = super().dense(weight, prepared.tensors[-1].numpy())
        return prepared

    def dense(self, weight: PackedWeight, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        known = self._kept.get(scales.__array_interface__["data"][0])
        return super().dense(weight, scales) if known is None else known


class HidesLevels(ToyKernel):
    """Makes a byte of each code when it prepares, and keeps them where only it knows."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: dict[int, NDArray[np.uint8]] = {}

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        own = self.weight(prepared)
        self._kept[own.qdata.data_ptr()] = super().codes(own, 0, own.out_features)
        return prepared

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        known = self._kept.get(weight.qdata.data_ptr())
        return super().codes(weight, start, stop) if known is None else known[start:stop]


DENSE_FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=f"fault-{name}", make=make, format="nf4", caught_by="EX-14/kind", says=says, is_numeric=False)
    for name, make, says in (
        ("hidden-dense-in-torch", DensePython, "elements were made"),
        ("hidden-levels-in-torch", LevelsPython, "elements were made"),
        ("hidden-dense-native", DenseNative, "memory peaked"),
        ("hidden-dense-in-halves", DenseHalves, "memory peaked"),
        ("hidden-dense-levels", DenseLevels, "memory peaked"),
        ("hidden-dense-for-int8", DenseForInt8, "dot_w4a8, M = 1: memory peaked"),
        ("hidden-dense-for-bfloat16", DenseForBfloat16, "gemv_w4a16, M = 1: memory peaked"),
        ("hidden-dense-for-many-rows", DenseForMany, "M = 64: memory peaked"),
        ("keeps-dense-scratch", DenseScratch, "stay beside"),
        ("keeps-dense-in-halves", KeepsHalves, "prepared tensors"),
        ("keeps-dense-levels", KeepsLevels, "prepared tensors"),
        ("hides-dense", HidesDense, "stay beside"),
        ("hides-dense-levels", HidesLevels, "stay beside"),
    )
)
