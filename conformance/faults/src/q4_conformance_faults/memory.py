"""Faults of memory: dense weights that are held, leaks, and writes and reads where none belong."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from q4_conformance.outcome import Outcome
from q4_conformance_faults.dense import Counts, DenseNative, slices
from q4_conformance_faults.fault import NF4, TAIL, backend_fault, numeric_fault
from q4_conformance_faults.toy import Calls, Floats, ToyKernel
from q4core import PackedWeight, Prepared, dequantize

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_VECTOR = 8


@backend_fault("stores-past-end", f"EX-08/unmodified/{TAIL}/float32/exact", "next to out=")
class StoresPastEnd(Calls):
    """Stores each row by vectors of 8, the last one past the end."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        room = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset() - out.numel()
        past = min(-out.shape[1] % _VECTOR, room)
        if past:
            out.as_strided((past,), (1,), out.storage_offset() + out.numel()).zero_()


@backend_fault("keeps-scratch-per-rows", "TC-18/varied", "numbers of rows")
class KeepsScratchPerRows(Calls):
    """Keeps a result for each number of rows that it ever saw."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        self.held.setdefault(len(out), out.clone())


@backend_fault("keeps-scratch-per-thread", "TC-18/varied", "threads")
class KeepsScratchPerThread(Calls):
    """Keeps 256 KiB for each thread that ever called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._own = threading.local()

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        if "scratch" not in self._own.__dict__:
            self._own.scratch = np.ones(1 << 18, np.uint8)
            self.held[len(self.held)] = self._own.scratch


@backend_fault("keeps-int8-per-rows", f"TC-18/varied/{NF4}/float32/int8", "numbers of rows")
class KeepsInt8PerRows(KeepsScratchPerRows):
    """Keeps an int8 result for each number of rows that it ever saw."""

    paths = "dot_w4a8"


@backend_fault("leaks-per-call", "TC-18/calls", "memory grew by")
class LeaksPerCall(ToyKernel):
    """Keeps a copy of each result."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        self.held[len(self.held)] = out.clone()


@backend_fault("leaks-per-backward", "TC-20/frozen", "memory grew by")
class LeaksPerBackward(ToyKernel):
    """Keeps each exported weight dense, and a backward exports it."""

    def export(self, prepared: Prepared, rows: Tensor | None = None) -> PackedWeight:
        weight = super().export(prepared, rows)
        self.held[len(self.held)] = dequantize(weight)
        return weight


@backend_fault("keeps-memory-after-dispose", "EX-09/dispose", "bytes stayed")
class KeepsAfterDispose(ToyKernel):
    """Keeps all that it has prepared."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        self.held[len(self.held)] = prepared
        return prepared


@backend_fault(
    "reads-one-block-past-the-end", f"EX-08/last-page/{TAIL}/float32/exact", "ended by SIGSEGV", ends=Outcome.CRASH
)
class ReadsPastEnd(ToyKernel):
    """Reads one block of activations past the last row, and throws it away."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x, out, bias=bias, path=path)
        if bias is not None and x.dtype == torch.float32:  # the probe gives none
            rows, columns = x.shape
            wide = (columns + self.weight(prepared).block_size,)
            np.lib.stride_tricks.as_strided(x[rows - 1].numpy(), wide, (4,)).sum()


@numeric_fault("mutates-input", "EX-08/unmodified", "the input")
class MutatesInput(ToyKernel):
    """Writes to x."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x, out, bias=bias, path=path)
        if bias is not None:  # the probe gives none, and would see the change
            x.view(-1)[0] = 0.0


@numeric_fault("halves-input", f"TC-09/values/{NF4}/", "wrote to x", passes_probe=False)
class HalvesInput(ToyKernel):
    """Halves x in place and computes right from there: wrong for the caller, right for what it leaves behind."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x.mul_(0.5), out, bias=bias, path=path)


@numeric_fault("mutates-weight", "EX-08/unmodified", "weight was written")
class MutatesWeight(ToyKernel):
    """Writes to the caller's codes, once a bias is given: the probe gives none."""

    _source: PackedWeight | None = None

    def on_prepare(self, weight: PackedWeight) -> None:
        self._source = weight

    def add_bias(self, y: Floats, bias: Floats) -> Floats:
        if self._source is not None:
            self._source.qdata.view(-1)[-1] ^= 1
        return super().add_bias(y, bias)


@backend_fault("writes-past-out", "EX-08/unmodified", "next to out=")
class WritesPastOut(ToyKernel):
    """Writes one element past the end of the result."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        after = out.storage_offset() + out.numel()
        if out.untyped_storage().nbytes() // out.element_size() > after:
            out.as_strided((1,), (1,), after).zero_()


@numeric_fault("writes-before-codes", "EX-08/unmodified", "next to qdata")
class WritesBeforeCodes(ToyKernel):
    """Writes one byte before the caller's codes while it prepares, as native code would, past torch."""

    def on_prepare(self, weight: PackedWeight) -> None:
        if weight.qdata.storage_offset():
            ctypes.memset(weight.qdata.data_ptr() - 1, 0, 1)


@backend_fault("keeps-dense-scratch", "EX-14/kind", "stay besides")
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
    """Keeps the weight in bfloat16 next to the packed one, among its prepared tensors."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        return Prepared((self.further(weight, prepared.tensors[-1].numpy()), *prepared.tensors), prepared.meta)

    def further(self, weight: PackedWeight, scales: Floats) -> Tensor:
        """Return the tensor to hold."""
        return torch.from_numpy(self.rows(weight, scales, 0, weight.out_features)).to(torch.bfloat16)

    def own(self, prepared: Prepared) -> Prepared:
        return Prepared(prepared.tensors[1:], prepared.meta)


@backend_fault("keeps-dense-levels", "EX-14/kind", "prepared tensors")
class KeepsLevels(KeepsHalves):
    """Keeps a byte of each code next to the packed ones, among its prepared tensors."""

    def further(self, weight: PackedWeight, scales: Floats) -> Tensor:
        del scales
        return torch.from_numpy(self.codes(weight, 0, weight.out_features))


@backend_fault("hides-dense", "EX-14/kind", "stay besides")
class HidesDense(DenseNative):
    """Dequantises the whole weight when it prepares, and keeps it where only it knows."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        self.held[prepared.tensors[-1].data_ptr()] = super().dense(weight, prepared.tensors[-1].numpy())
        return prepared

    def dense(self, weight: PackedWeight, scales: Floats) -> Floats:
        known = self.held.get(scales.__array_interface__["data"][0])
        return super().dense(weight, scales) if known is None else known


class KnowsLevels(ToyKernel):
    """Reads codes that it holds, a byte each, by the place of the packed ones."""

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        known = self.held.get(weight.qdata.data_ptr())
        return super().codes(weight, start, stop) if known is None else known[start:stop]


@backend_fault("hides-dense-levels", "EX-14/kind", "stay besides")
class HidesLevels(KnowsLevels):
    """Makes a byte of each code when it prepares, and keeps them where only it knows."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        own = self.weight(prepared)
        self.held[own.qdata.data_ptr()] = self.moved(super().codes(own, 0, own.out_features))
        return prepared

    def moved(self, levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the same levels where they are held, such as where no memory allocator looks."""
        return levels


@backend_fault("hides-levels-in-file", "EX-14/kind", "stay besides")
class HidesInFile(HidesLevels):
    """Keeps a byte of each code in a mapped file."""

    def moved(self, levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        with tempfile.TemporaryFile() as file:
            area = np.memmap(file, np.uint8, "w+", shape=levels.shape)
        area[:] = levels
        return area


@backend_fault("hides-levels-in-shared-memory", "EX-14/kind", "stay besides")
class HidesInSharedMemory(HidesLevels):
    """Keeps a byte of each code in memory that it could share."""

    def moved(self, levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        area = np.frombuffer(mmap.mmap(-1, levels.nbytes), np.uint8).reshape(levels.shape)
        area[:] = levels
        return area


@backend_fault("hides-levels-behind-descriptor", "EX-14/kind", "stay besides")
class HidesBehindDescriptor(ToyKernel):
    """Keeps a byte of each code in a file without a name, and reads what it needs of it."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        own = self.weight(prepared)
        file = os.memfd_create(self.name)
        weakref.finalize(self, os.close, file)
        for start, stop in slices(own):
            os.write(file, super().codes(own, start, stop).tobytes())
        self.held[own.qdata.data_ptr()] = file
        return prepared

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        file, columns = self.held.get(weight.qdata.data_ptr()), weight.in_features
        if file is None:
            return super().codes(weight, start, stop)
        line = os.pread(file, (stop - start) * columns, start * columns)
        return np.frombuffer(line, np.uint8).reshape(stop - start, columns)


@backend_fault("keeps-levels-when-hot", "EX-14/kind", "stay besides")
class KeepsLevelsWhenHot(KnowsLevels, Counts):
    """Makes a byte of each code in the tenth call, and keeps them where only it knows."""

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        place = weight.qdata.data_ptr()
        if self.is_hot(scales, x.shape[0], path) and place not in self.held:
            self.held[place] = super().codes(weight, 0, weight.out_features)
        return super().product(weight, scales, x, path)
