"""Correct backends that look unusual: each must pass every case."""
# ruff: noqa: ARG002, D102 - each looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from q4_conformance_faults.toy import Floats, ToyKernel
from q4core import Prepared

if TYPE_CHECKING:
    from torch import Tensor

    from q4core import PackedWeight

__all__ = ["UNUSUAL", "LazyKernel", "PaddedKernel", "ReorderedKernel", "SlicedKernel"]

_STRIDE = 37
_ALIGN_BYTES = 512
_ROWS = 8


class ReorderedKernel(ToyKernel):
    """Accumulates every 37th column together, last columns first: another order of sums, and as right as any."""

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        total = np.zeros((values.shape[0], dense.shape[0]), np.float32)
        for start in reversed(range(min(_STRIDE, values.shape[1]))):
            total += values[:, start::_STRIDE] @ dense[:, start::_STRIDE].T
        return total


class PaddedKernel(ToyKernel):
    """Stores each tensor behind and before bytes of no meaning, in one piece of memory a multiple of 512 bytes long."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        padded = [self._padded(tensor) for tensor in prepared.tensors]
        forms = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in prepared.tensors)
        return Prepared(padded, (prepared.meta, forms))

    def _padded(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        area = torch.randint(
            0,
            256,
            (_ALIGN_BYTES + -(-size // _ALIGN_BYTES) * _ALIGN_BYTES,),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(size),  # the process-wide one is left alone
        )
        area[_ALIGN_BYTES : _ALIGN_BYTES + size] = tensor.contiguous().view(-1).view(torch.uint8)
        return area

    def own(self, prepared: Prepared) -> Prepared:
        meta, forms = prepared.meta
        tensors = []
        for area, (dtype, shape) in zip(prepared.tensors, forms, strict=True):
            size = int(np.prod(shape, dtype=int)) * dtype.itemsize
            tensors.append(area[_ALIGN_BYTES : _ALIGN_BYTES + size].view(dtype).view(shape))
        return Prepared(tensors, meta)


class LazyKernel(ToyKernel):
    """Takes the memory for its scales in ``prepare``, and computes them in the first call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock out, which no other process can have."""
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a lock."""
        vars(self).update(state, _lock=threading.Lock())

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        later = torch.full_like(prepared.tensors[-1], torch.nan)
        return Prepared((*prepared.tensors[:-1], torch.zeros(1, dtype=torch.uint8), later), prepared.meta)

    def own(self, prepared: Prepared) -> Prepared:
        *stored, done, scales = prepared.tensors
        own = Prepared((*stored, scales), prepared.meta)
        with self._lock:
            if not done:
                scales.copy_(torch.from_numpy(self.scales(self.weight(own))))
                done.fill_(1)
        return own


class SlicedKernel(ToyKernel):
    """Decodes eight rows at a time in torch's own operations: all rows in sum, and eight at once."""

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        values = torch.from_numpy(self.inputs(weight, x, path))
        y = torch.empty(len(values), weight.out_features, dtype=torch.float32)
        for start in range(0, weight.out_features, _ROWS):
            stop = min(start + _ROWS, weight.out_features)
            rows = torch.from_numpy(self.rows(weight, scales, start, stop)).clone()
            torch.mm(values, rows.T, out=y[:, start:stop])
        result: Floats = y.numpy()
        return result


UNUSUAL = (
    ReorderedKernel("unusual-reordered"),
    PaddedKernel("unusual-padded"),
    LazyKernel("unusual-lazy"),
    SlicedKernel("unusual-sliced"),
)
