"""Backends that say KERNEL and keep a dense weight all the same: among what they prepare, or out of sight."""
# ruff: noqa: D102 - what is overridden is documented in ToyKernel

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from q4_conformance_faults.dense import Counts, DenseNative, slices
from q4_conformance_faults.toy import ToyKernel
from q4core import Prepared

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4core import PackedWeight, PrepareContext, Request


class DenseScratch(DenseNative):
    """Dequantises into memory that it took for the largest weight so far, and keeps."""

    _scratch: NDArray[np.float32] | None = None

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        size = weight.out_features * weight.in_features
        if self._scratch is None or self._scratch.size < size:
            self._scratch = np.empty(size, np.float32)
        self.filled(weight, scales, self._scratch[:size].reshape(weight.shape))
        return ToyKernel.product(self, weight, scales, x, path)  # BLAS would take memory of its own for a dense weight


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


class HidesInMemory(HidesLevels):
    """Makes a byte of each code when it prepares, and keeps them where no memory allocator looks."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        place = self.weight(prepared).qdata.data_ptr()
        self._kept[place] = self.moved(self._kept[place])
        return prepared

    def moved(self, levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the same levels at another place."""
        raise NotImplementedError


class HidesInFile(HidesInMemory):
    """Keeps a byte of each code in a mapped file."""

    def moved(self, levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        with tempfile.TemporaryFile() as file:
            area = np.memmap(file, np.uint8, "w+", shape=levels.shape)
        area[:] = levels
        return area


class HidesInSharedMemory(HidesInMemory):
    """Keeps a byte of each code in memory that it could share."""

    def moved(self, levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        area = np.frombuffer(mmap.mmap(-1, levels.nbytes), np.uint8).reshape(levels.shape)
        area[:] = levels
        return area


class HidesBehindDescriptor(ToyKernel):
    """Keeps a byte of each code in a file without a name, and reads what it needs of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: dict[int, int] = {}

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        own = self.weight(prepared)
        file = os.memfd_create(self.name)
        weakref.finalize(self, os.close, file)
        for start, stop in slices(own):
            os.write(file, super().codes(own, start, stop).tobytes())
        self._kept[own.qdata.data_ptr()] = file
        return prepared

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        file, columns = self._kept.get(weight.qdata.data_ptr()), weight.in_features
        if file is None:
            return super().codes(weight, start, stop)
        line = os.pread(file, (stop - start) * columns, start * columns)
        return np.frombuffer(line, np.uint8).reshape(stop - start, columns)


class KeepsLevelsWhenHot(Counts):
    """Makes a byte of each code in the tenth call, and keeps them where only it knows."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: dict[int, NDArray[np.uint8]] = {}

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        place = weight.qdata.data_ptr()
        if self.is_hot(scales, x.shape[0], path) and place not in self._kept:
            self._kept[place] = super().codes(weight, 0, weight.out_features)
        return super().product(weight, scales, x, path)

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        known = self._kept.get(weight.qdata.data_ptr())
        return super().codes(weight, start, stop) if known is None else known[start:stop]
