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
from q4_conformance_faults.fault import backend_fault
from q4_conformance_faults.toy import Floats, ToyKernel
from q4core import Prepared

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from q4core import PackedWeight, PrepareContext, Request


@backend_fault("keeps-dense-scratch", "EX-14/kind", "stay beside")
class DenseScratch(DenseNative):
    """Dequantises into memory that it took for the largest weight so far, and keeps."""

    _scratch: Floats | None = None

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        size = weight.out_features * weight.in_features
        if self._scratch is None or self._scratch.size < size:
            self._scratch = np.empty(size, np.float32)
        self.filled(weight, scales, self._scratch[:size].reshape(weight.shape))
        return ToyKernel.product(self, weight, scales, x, path)  # BLAS would take memory of its own for a dense weight


@backend_fault("keeps-dense-in-halves", "EX-14/kind", "prepared tensors")
class KeepsHalves(ToyKernel):
    """Keeps the weight in bfloat16 beside the packed one, among its prepared tensors."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        plain = super().prepare(weight, request, context)
        return Prepared((self.beside(weight, plain.tensors[-1].numpy()), *plain.tensors), plain.meta)

    def beside(self, weight: PackedWeight, scales: Floats) -> Tensor:
        """Return what is kept."""
        return torch.from_numpy(self.rows(weight, scales, 0, weight.out_features)).to(torch.bfloat16)

    def own(self, prepared: Prepared) -> Prepared:
        return Prepared(prepared.tensors[1:], prepared.meta)


@backend_fault("keeps-dense-levels", "EX-14/kind", "prepared tensors")
class KeepsLevels(KeepsHalves):
    """Keeps a byte of each code beside the packed ones, among its prepared tensors."""

    def beside(self, weight: PackedWeight, scales: Floats) -> Tensor:
        del scales
        return torch.from_numpy(self.codes(weight, 0, weight.out_features))


@backend_fault("hides-dense", "EX-14/kind", "stay beside")
class HidesDense(DenseNative):
    """Dequantises the whole weight when it prepares, and keeps it where only it knows."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        self.kept[prepared.tensors[-1].data_ptr()] = super().dense(weight, prepared.tensors[-1].numpy())
        return prepared

    def dense(self, weight: PackedWeight, scales: Floats) -> Floats:
        known = self.kept.get(scales.__array_interface__["data"][0])
        return super().dense(weight, scales) if known is None else known


class KnowsLevels(ToyKernel):
    """Reads codes where it has kept them, a byte each, by the place of the packed ones."""

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        known = self.kept.get(weight.qdata.data_ptr())
        return super().codes(weight, start, stop) if known is None else known[start:stop]


@backend_fault("hides-dense-levels", "EX-14/kind", "stay beside")
class HidesLevels(KnowsLevels):
    """Makes a byte of each code when it prepares, and keeps them where only it knows."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        own = self.weight(prepared)
        self.kept[own.qdata.data_ptr()] = self.moved(super().codes(own, 0, own.out_features))
        return prepared

    def moved(self, levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the same levels where they are kept, such as where no memory allocator looks."""
        return levels


@backend_fault("hides-levels-in-file", "EX-14/kind", "stay beside")
class HidesInFile(HidesLevels):
    """Keeps a byte of each code in a mapped file."""

    def moved(self, levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        with tempfile.TemporaryFile() as file:
            area = np.memmap(file, np.uint8, "w+", shape=levels.shape)
        area[:] = levels
        return area


@backend_fault("hides-levels-in-shared-memory", "EX-14/kind", "stay beside")
class HidesInSharedMemory(HidesLevels):
    """Keeps a byte of each code in memory that it could share."""

    def moved(self, levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        area = np.frombuffer(mmap.mmap(-1, levels.nbytes), np.uint8).reshape(levels.shape)
        area[:] = levels
        return area


@backend_fault("hides-levels-behind-descriptor", "EX-14/kind", "stay beside")
class HidesBehindDescriptor(ToyKernel):
    """Keeps a byte of each code in a file without a name, and reads what it needs of it."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        own = self.weight(prepared)
        file = os.memfd_create(self.name)
        weakref.finalize(self, os.close, file)
        for start, stop in slices(own):
            os.write(file, super().codes(own, start, stop).tobytes())
        self.kept[own.qdata.data_ptr()] = file
        return prepared

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        file, columns = self.kept.get(weight.qdata.data_ptr()), weight.in_features
        if file is None:
            return super().codes(weight, start, stop)
        line = os.pread(file, (stop - start) * columns, start * columns)
        return np.frombuffer(line, np.uint8).reshape(stop - start, columns)


@backend_fault("keeps-levels-when-hot", "EX-14/kind", "stay beside")
class KeepsLevelsWhenHot(KnowsLevels, Counts):
    """Makes a byte of each code in the tenth call, and keeps them where only it knows."""

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        place = weight.qdata.data_ptr()
        if self.is_hot(scales, x.shape[0], path) and place not in self.kept:
            self.kept[place] = super().codes(weight, 0, weight.out_features)
        return super().product(weight, scales, x, path)
