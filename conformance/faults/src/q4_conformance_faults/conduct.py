"""Backends whose numbers are right and whose conduct is not."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch

from q4_conformance.outcome import Outcome
from q4_conformance_faults.fault import NF4, backend_fault, numeric_fault
from q4_conformance_faults.numbers import Spoils
from q4_conformance_faults.toy import Floats, ToyKernel
from q4core import KernelPath, PackedWeight, PathKind, Precision, Prepared, Reason, ReasonCode, Support

if TYPE_CHECKING:
    from torch import Tensor

    from q4core import PrepareContext, Request


@numeric_fault("silences-nan", "EX-10/non-finite", "finite numbers")
class SilencesNan(ToyKernel):
    """Turns NaN and infinity into zero."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return super().inputs(weight, torch.nan_to_num(x, 0.0, 0.0, 0.0), path)


@numeric_fault("mutates-input", "EX-08/unmodified", "the input")
class MutatesInput(ToyKernel):
    """Writes to x."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x, out, bias=bias, path=path)
        if bias is not None:  # the probe gives none, and would see the change
            x.view(-1)[0] = 0.0


@numeric_fault("halves-input", f"TC-09/values/{NF4}/", "wrote to x", passes_probe=False)
class HalvesInput(ToyKernel):
    """Halves x in place and computes right from there: wrong for the caller, right beside what it leaves behind."""

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x.mul_(0.5), out, bias=bias, path=path)


@numeric_fault("mutates-weight", "EX-08/unmodified", "weight was written")
class MutatesWeight(ToyKernel):
    """Writes to the caller's codes, once a bias is given: the probe gives none."""

    _source: PackedWeight | None = None

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        self._source = weight
        return super().prepare(weight, request, context)

    def add_bias(self, y: Floats, bias: Floats) -> Floats:
        if self._source is not None:
            self._source.qdata.view(-1)[-1] ^= 1
        return super().add_bias(y, bias)


@backend_fault("writes-beside-out", "EX-08/unmodified", "beside out=")
class WritesBeside(ToyKernel):
    """Writes one element past the end of the result."""

    def write(self, y: Tensor, out: Tensor) -> None:
        super().write(y, out)
        after = out.storage_offset() + out.numel()
        if out.untyped_storage().nbytes() // out.element_size() > after:
            out.as_strided((1,), (1,), after).zero_()


@numeric_fault("writes-beside-codes", "EX-08/unmodified", "beside qdata")
class WritesBesideCodes(ToyKernel):
    """Writes one byte before the caller's codes while it prepares, as native code would, past torch."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        if weight.qdata.storage_offset():
            ctypes.memset(weight.qdata.data_ptr() - 1, 0, 1)
        return super().prepare(weight, request, context)


@numeric_fault("not-thread-safe", "EX-04/threads", "other bits")
class SharedScratch(ToyKernel):
    """Keeps its result in the backend before it writes it: two threads meet there."""

    _scratch: Tensor | None = None

    def write(self, y: Tensor, out: Tensor) -> None:
        self._scratch = y
        time.sleep(0.001)
        if self._scratch.shape == out.shape:
            out.copy_(self._scratch)
        else:
            out.zero_()


@numeric_fault("not-thread-safe-across-layers", "EX-04/threads", "other bits from layer")
class SharedPlace(ToyKernel):
    """Keeps in the backend whose layer it works for: right for any number of threads that share one."""

    _place: Prepared | None = None

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        self._place = prepared
        time.sleep(0.001)
        super().linear(self._place, x, out, bias=bias, path=path)


@backend_fault("prepares-the-first-range", "EX-19/ranges", "no code for 2 rows", passes_probe=False)
class PreparesFirstRange(ToyKernel):
    """Compiles, once for each path, for the rows that the first layer asked for, and fails with others."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        for segment in context.paths:
            self.kept.setdefault(segment.path.name, segment)
        return super().prepare(weight, request, context)

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        segment = self.kept[path]
        if x.shape[0] < segment.low or (segment.high is not None and x.shape[0] > segment.high):
            raise LookupError(f"no code for {x.shape[0]} rows")
        super().linear(prepared, x, out, bias=bias, path=path)


@numeric_fault("raises-in-linear", "EX-01/rows", "tile out of range")
class RaisesInLinear(Spoils):
    """Raises where M is 129."""

    def spoil(self, y: Floats) -> None:
        if y.shape[0] == 129:  # noqa: PLR2004  # far from where the probe looks
            raise IndexError("tile out of range")


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
