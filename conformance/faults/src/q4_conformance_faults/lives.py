"""Backends that are right in one call and wrong over a layer's life: leaks, things kept, things that are not copied."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from q4_conformance.outcome import Outcome
from q4_conformance_faults.fault import NF4, TAIL, backend_fault
from q4_conformance_faults.toy import Floats, ToyKernel
from q4core import Prepared, dequantize

if TYPE_CHECKING:
    from torch import Tensor

    from q4core import PackedWeight, PrepareContext, Request


@backend_fault("leaks-per-call", "TC-18/calls", "memory grew by")
class LeaksPerCall(ToyKernel):
    """Keeps a copy of each result."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        self.kept[len(self.kept)] = out.clone()


@backend_fault("leaks-per-backward", "TC-20/frozen", "memory grew by")
class LeaksPerBackward(ToyKernel):
    """Keeps each exported weight dense, and a backward exports it."""

    def export(self, prepared: Prepared, rows: Tensor | None = None) -> PackedWeight:
        weight = super().export(prepared, rows)
        self.kept[len(self.kept)] = dequantize(weight)
        return weight


@backend_fault("keeps-memory-after-dispose", "EX-09/dispose", "bytes stayed")
class KeepsAfterDispose(ToyKernel):
    """Keeps whatever it has prepared, for a next time that never comes."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        self.kept[len(self.kept)] = prepared
        return prepared


@backend_fault("shares-one-buffer", "TC-09/prepare", "other bits")
class SharesOneBuffer(ToyKernel):
    """Prepares all weights of one form into the same memory."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        kept: Prepared = self.kept.setdefault(prepared.meta, prepared)
        for old, new in zip(kept.tensors, prepared.tensors, strict=True):
            old.copy_(new)
        return kept


@backend_fault("numbers-its-layers", "TC-09/prepare", "meta is")
class NumbersItsLayers(ToyKernel):
    """Writes a number of its own into each layer's description, so that no two layers share a graph."""

    _count = 0

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        self._count += 1
        return Prepared((*prepared.tensors, torch.zeros(1)), (prepared.meta, self._count))

    def own(self, prepared: Prepared) -> Prepared:
        return Prepared(prepared.tensors[:-1], prepared.meta[0])


@backend_fault("knows-by-address", "EX-15/copies", "deeply copied layer")
class KnowsByAddress(ToyKernel):
    """Keeps its scales by the address of what it prepared, and computes with zeros for a copy."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        self.kept[prepared.tensors[0].data_ptr()] = self.scales(weight)
        return prepared

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        kept = self.kept.get(prepared.tensors[0].data_ptr())
        scales = torch.zeros_like(prepared.tensors[-1]) if kept is None else torch.from_numpy(kept)
        own = Prepared((*prepared.tensors[:-1], scales), prepared.meta)
        super().linear(own, x, out, bias=bias, path=path)


@backend_fault("mutates-state-dict", "EX-06/state", "running changed")
class MutatesState(ToyKernel):
    """Writes to the stored scales that its export gives back, not to those that it computes with."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x, out, bias=bias, path=path)
        if bias is not None:  # the probe gives none, and would see the change
            prepared.tensors[1].mul_(1.5)


@backend_fault("ignores-out-for-m-5", "TC-09/out", "non_finite")
class WritesNothing(ToyKernel):
    """Forgets to write where M is 5, so that ``out=`` keeps what it held."""

    def write(self, y: Tensor, out: Tensor) -> None:
        if y.shape[0] != 5:  # noqa: PLR2004  # far from where the probe looks
            out.copy_(y)


@backend_fault("wrong-out-dtype", f"EX-02/dtypes/{NF4}/bfloat16", "torch.bfloat16 to torch.float32")
class RoundsToInputDtype(ToyKernel):
    """Rounds to x's dtype before it rounds to the one that is asked for."""

    _dtype = torch.float32

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        self._dtype = x.dtype
        return super().product(weight, scales, x, path)

    def write(self, y: Tensor, out: Tensor) -> None:
        out.copy_(y.to(self._dtype))


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


@backend_fault("pads-with-neighbours", "TC-11/strided", "non_finite")
class PadsWithNeighbours(ToyKernel):
    """Reads one block past the end of each row of x and multiplies it by a weight of zero."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        values = super().inputs(weight, x, path)
        end = x.storage_offset() + (x.shape[0] - 1) * x.stride(0) + x.shape[1]
        if x.untyped_storage().nbytes() // x.element_size() > end:
            beside = x.as_strided((x.shape[0], 1), (x.stride(0), 1), x.storage_offset() + x.shape[1])
            values = values + beside.to(torch.float32).numpy() * np.float32(0)
        return values


@backend_fault("lies-about-alignment", "TC-11/strided", "M = 1")
class LiesAboutAlignment(ToyKernel):
    """Declares every address, and reads x from the multiple of 16 below it."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        shift = min(x.data_ptr() % 16 // x.element_size(), x.storage_offset())
        aligned = x.as_strided(x.shape, x.stride(), x.storage_offset() - shift)
        return super().inputs(weight, aligned, path)


@backend_fault("hidden-fallback", "EX-14/kind", "alive at once")
class HiddenFallback(ToyKernel):
    """Says KERNEL, and leaves the work to the core's own decoder and torch's matmul."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        y = x.to(torch.float32) @ dequantize(self.weight(prepared), torch.float32).T
        out.copy_(y if bias is None else y + bias)
