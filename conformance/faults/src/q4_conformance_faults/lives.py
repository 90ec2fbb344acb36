"""Backends that are right in one call and wrong over a layer's life: leaks, things kept, things that are not copied."""
# ruff: noqa: D102 - what is overridden is documented in ToyKernel

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance_faults.numbers import Spoils
from q4_conformance_faults.toy import ToyKernel
from q4core import Prepared, dequantize

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4core import PackedWeight, PrepareContext, Request


class LeaksPerCall(ToyKernel):
    """Keeps a copy of each result."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: list[torch.Tensor] = []

    def write(self, y: torch.Tensor, out: torch.Tensor) -> None:
        super().write(y, out)
        self._kept.append(out.clone())


class LeaksPerBackward(ToyKernel):
    """Keeps each exported weight dense, and a backward exports it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: list[torch.Tensor] = []

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        weight = super().export(prepared, rows)
        self._kept.append(dequantize(weight))
        return weight


class KeepsAfterDispose(ToyKernel):
    """Keeps whatever it has prepared, for a next time that never comes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: list[Prepared] = []

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        self._kept.append(prepared)
        return prepared


class SharesOneBuffer(ToyKernel):
    """Prepares all weights of one form into the same memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._places: dict[Any, Prepared] = {}

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        kept = self._places.setdefault(prepared.meta, prepared)
        for old, new in zip(kept.tensors, prepared.tensors, strict=True):
            old.copy_(new)
        return kept


class NumbersItsLayers(ToyKernel):
    """Writes a number of its own into each layer's description, so that no two layers share a graph."""

    _count = 0

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        self._count += 1
        return Prepared((*prepared.tensors, torch.zeros(1)), (prepared.meta, self._count))

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        super().linear(Prepared(prepared.tensors[:-1], prepared.meta[0]), x, out, bias=bias, path=path)

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        return super().export(Prepared(prepared.tensors[:-1], prepared.meta[0]), rows)


class KnowsByAddress(ToyKernel):
    """Keeps its scales by the address of what it prepared, and computes with zeros for a copy."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._scales: dict[int, NDArray[np.float32]] = {}

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        self._scales[prepared.tensors[0].data_ptr()] = self.scales(weight)
        return prepared

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        kept = self._scales.get(prepared.tensors[0].data_ptr())
        scales = torch.zeros_like(prepared.tensors[-1]) if kept is None else torch.from_numpy(kept)
        own = Prepared((*prepared.tensors[:-1], scales), prepared.meta)
        super().linear(own, x, out, bias=bias, path=path)


class MutatesState(ToyKernel):
    """Writes to the stored scales that its export gives back, not to those that it computes with."""

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        super().linear(prepared, x, out, bias=bias, path=path)
        if bias is not None:  # the probe gives none, and would see the change
            prepared.tensors[1].mul_(1.5)


class WritesNothing(Spoils):
    """Forgets to write where M is 5, so that ``out=`` keeps what it held."""

    def write(self, y: torch.Tensor, out: torch.Tensor) -> None:
        if y.shape[0] != 5:  # noqa: PLR2004  # far from where the probe looks
            out.copy_(y)

    def spoil(self, y: NDArray[np.float32]) -> None:
        del y


class RoundsToInputDtype(ToyKernel):
    """Rounds to x's dtype before it rounds to the one that is asked for."""

    _dtype = torch.float32

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        self._dtype = x.dtype
        return super().product(weight, scales, x, path)

    def write(self, y: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(y.to(self._dtype))


class DropsGradients(ToyKernel):
    """Exports zero scales once the self-probe has seen two right exports, so that no gradient comes through."""

    _exports = 0

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        weight = super().export(prepared, rows)
        self._exports += 1
        return weight if self._exports <= 2 else attrs.evolve(weight, scale=torch.zeros_like(weight.scale))  # noqa: PLR2004  # as it says


class ReadsPastEnd(ToyKernel):
    """Reads one block of activations past the last row, and throws it away."""

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        super().linear(prepared, x, out, bias=bias, path=path)
        if bias is not None and x.dtype == torch.float32:  # the probe gives none
            rows, columns = x.shape
            wide = (columns + self.weight(prepared).block_size,)
            np.lib.stride_tricks.as_strided(x[rows - 1].numpy(), wide, (4,)).sum()


class PadsWithNeighbours(ToyKernel):
    """Reads one block past the end of each row of x and multiplies it by a weight of zero."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        values = super().inputs(weight, x, path)
        end = x.storage_offset() + (x.shape[0] - 1) * x.stride(0) + x.shape[1]
        if x.untyped_storage().nbytes() // x.element_size() > end:
            beside = x.as_strided((x.shape[0], 1), (x.stride(0), 1), x.storage_offset() + x.shape[1])
            values = values + beside.to(torch.float32).numpy() * np.float32(0)
        return values


class LiesAboutAlignment(ToyKernel):
    """Declares every address, and reads x from the multiple of 16 below it."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        shift = min(x.data_ptr() % 16 // x.element_size(), x.storage_offset())
        aligned = x.as_strided(x.shape, x.stride(), x.storage_offset() - shift)
        return super().inputs(weight, aligned, path)


class HiddenFallback(ToyKernel):
    """Says KERNEL, and leaves the work to the core's own decoder and torch's matmul."""

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        del path
        y = x.to(torch.float32) @ dequantize(self.weight(prepared), torch.float32).T
        out.copy_(y if bias is None else y + bias)
