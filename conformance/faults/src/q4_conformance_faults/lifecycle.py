"""Faults over the life of a layer: preparing, refusing, settings, what changes or is copied, crashes and hangs."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from q4_conformance.outcome import Outcome
from q4_conformance_faults.fault import NF4, backend_fault, numeric_fault
from q4_conformance_faults.toy import Calls, Floats, Spoils, ToyKernel
from q4core import KernelPath, PackedWeight, PathKind, Precision, Prepared, Reason, ReasonCode, Support

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from q4core import PrepareContext, Request


@backend_fault("converts-bias-by-address", f"EX-03/changed/{NF4}/float32/exact", "another x and bias")
class BiasByAddress(Calls):
    """Converts each bias once, by its address."""

    def bias(self, bias: Tensor) -> Tensor:
        converted: Tensor = self.held.setdefault(bias.data_ptr(), (bias, bias.clone()))[1]
        return converted


@backend_fault("keeps-last-block-size", f"EX-04/neighbours/{NF4}/float32/exact", "among")
class KeepsLastBlockSize(ToyKernel):
    """Keeps the block size of the layer that was prepared last for all of them."""

    _block_size = 0

    def on_prepare(self, weight: PackedWeight) -> None:
        self._block_size = weight.block_size

    def spread(self, weight: PackedWeight, numbers: NDArray[Any], start: int, stop: int) -> Floats:
        columns = weight.in_features
        owner = np.minimum(np.arange(columns) // self._block_size, numbers.shape[-1] - 1)
        if numbers.ndim == 1:  # flat blocks
            return super().spread(weight, numbers, start, stop)
        return numbers[start:stop].astype(np.float32)[:, owner]


@backend_fault("pads-over-leavings", f"EX-04/neighbours/{NF4}/float32/exact", "non_finite")
class PadsOverLeavings(ToyKernel):
    """Pads rows in a scratch that is cleared once only: what another layer left there meets weights of zero."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._scratch = threading.local()

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        rows, columns = values.shape
        scratch = self._scratch.__dict__.setdefault("values", np.zeros((32, 512), np.float32))
        if columns > scratch.shape[1]:
            return super().accumulate(values, dense)
        scratch[:rows, :columns] = values
        padded = np.zeros((len(dense), scratch.shape[1]), np.float32)
        padded[:, :columns] = dense
        return super().accumulate(scratch[:rows], padded)


@backend_fault("makes-table-in-default-dtype", "EX-03/modes", "default dtype bfloat16")
class MakesTableInDefaultDtype(ToyKernel):
    """Rounds scales to torch's default dtype."""

    def scales(self, weight: PackedWeight) -> Floats:
        scales = torch.from_numpy(super().scales(weight))
        dtype = torch.get_default_dtype()
        return (scales.to(dtype) if dtype.itemsize < scales.itemsize else scales).to(torch.float32).numpy()


@backend_fault("seeds-in-prepare", "EX-08/settings", "making the first layer changed torch's random state")
class SeedsInPrepare(ToyKernel):
    """Seeds torch's generator for the inputs that it tunes by."""

    def on_prepare(self, weight: PackedWeight) -> None:
        torch.manual_seed(0)


@backend_fault("seeds-in-int8", f"EX-08/settings/{NF4}/float32/int8", "changed torch's random state")
class SeedsInInt8(Calls):
    """Seeds torch's generator in each int8 call."""

    paths = "dot_w4a8"

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        torch.manual_seed(0)


@backend_fault("rounds-int8-to-default", f"EX-03/modes/{NF4}/float32/int8", "default dtype bfloat16")
class RoundsInt8ToDefault(Calls):
    """Rounds int8 results to torch's default dtype."""

    paths = "dot_w4a8"

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        out.copy_(out.to(torch.get_default_dtype()))


@numeric_fault("asks-for-versions", f"EX-03/inference/{NF4}/float32/exact", "version")
class AsksForVersions(ToyKernel):
    """Keeps the input's version, which tensors made in inference mode do not have."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        self.seen = x._version  # noqa: SLF001  # as kernels that cache their inputs do
        super().linear(prepared, x, out, bias=bias, path=path)


@backend_fault("shares-one-buffer", "TC-09/prepare", "other bits")
class SharesOneBuffer(ToyKernel):
    """Prepares all weights of one form into the same memory."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        shared: Prepared = self.held.setdefault(prepared.meta, prepared)
        for old, new in zip(shared.tensors, prepared.tensors, strict=True):
            old.copy_(new)
        return shared


@backend_fault("numbers-its-layers", "TC-09/prepare", "meta is")
class NumbersItsLayers(ToyKernel):
    """Writes a number of its own into each layer's description, so that no two layers share a graph."""

    _count = 0

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        self._count += 1
        return Prepared((*prepared.tensors, torch.zeros(1)), (prepared.meta, self._count))

    def own(self, prepared: Prepared) -> Prepared:
        return Prepared(prepared.tensors[:-1], prepared.meta[0])


@backend_fault("knows-by-address", "EX-15/copies", "deeply copied layer")
class KnowsByAddress(ToyKernel):
    """Keeps its scales by the address of what it prepared, and computes with zeros for a copy."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        self.held[prepared.tensors[0].data_ptr()] = self.scales(weight)
        return prepared

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        known = self.held.get(prepared.tensors[0].data_ptr())
        scales = torch.zeros_like(prepared.tensors[-1]) if known is None else torch.from_numpy(known)
        own = Prepared((*prepared.tensors[:-1], scales), prepared.meta)
        super().linear(own, x, out, bias=bias, path=path)


@backend_fault("mutates-state-dict", "EX-06/state", "running changed")
class MutatesState(ToyKernel):
    """Writes to the stored scales that its export gives back, not to those that it computes with."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x, out, bias=bias, path=path)
        if bias is not None:  # the probe gives none, and would see the change
            prepared.tensors[1].mul_(1.5)


@backend_fault("prepares-the-first-range", "EX-19/ranges", "no code for 2 rows", passes_probe=False)
class PreparesFirstRange(ToyKernel):
    """Compiles, once for each path, for the rows that the first layer asked for, and fails with others."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        for segment in context.paths:
            self.held.setdefault(segment.path.name, segment)
        return super().prepare(weight, request, context)

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        segment = self.held[path]
        if x.shape[0] < segment.low or (segment.high is not None and x.shape[0] > segment.high):
            raise LookupError(f"no code for {x.shape[0]} rows")
        super().linear(prepared, x, out, bias=bias, path=path)


@backend_fault("refuses-what-it-declares", f"TC-09/values/{NF4}/", "not today")
class RefusesDeclared(ToyKernel):
    """Refuses a format that its manifest declares."""

    def check(self, request: Request) -> Support:
        if request.format.name == "nf4":
            return Support.no([Reason(ReasonCode.SHAPE, "not today")], native_state="numpy")
        return super().check(request)


@backend_fault("leaves-a-gap", f"TC-09/values/{NF4}/", "no path for M in 17…32")
class LeavesGap(ToyKernel):
    """Offers nothing for 17 … 32 rows."""

    def check(self, request: Request) -> Support:
        paths = [
            KernelPath("low", (1, 16), PathKind.KERNEL, Precision.W4A32, 20),
            KernelPath("high", (33, None), PathKind.KERNEL, Precision.W4A32, 20),
        ]
        return Support.yes(paths, native_state="numpy")


class Talks(Spoils):
    """Prints while it computes, and leaves its lines open."""

    def spoil(self, y: Floats) -> None:
        sys.stdout.write(f"result {y.shape}\nand no end of line")


@backend_fault("crashes", f"EX-01/rows/{NF4}/float32/exact", "ended by SIGSEGV", ends=Outcome.CRASH)
class Crashes(Spoils):
    """Kills its process where M is 7."""

    def spoil(self, y: Floats) -> None:
        if y.shape[0] == 7:  # noqa: PLR2004  # far from where the probe looks
            os.kill(os.getpid(), signal.SIGSEGV)


@backend_fault("hangs", f"EX-01/rows/{NF4}/float32/exact", "no answer for", ends=Outcome.TIMEOUT)
class Hangs(Spoils):
    """Never comes back where M is 7."""

    def spoil(self, y: Floats) -> None:
        if y.shape[0] == 7:  # noqa: PLR2004  # far from where the probe looks
            threading.Event().wait()


crashing = functools.partial(Crashes, "fault-crashes")
"""Returns a backend that kills its process at M = 7."""
talking = functools.partial(Talks, "toy-talks")
"""Returns a right backend that prints while it computes."""
hanging = functools.partial(Hangs, "fault-hangs")
"""Returns a backend that never comes back at M = 7."""
