"""Backends whose numbers are right and whose conduct is not."""
# ruff: noqa: D102 - what is overridden is documented in ToyKernel

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance_faults.numbers import Spoils
from q4_conformance_faults.toy import ToyKernel
from q4core import (
    KernelPath,
    PackedWeight,
    PathKind,
    Precision,
    Prepared,
    PrepareError,
    Reason,
    ReasonCode,
    Segment,
    Support,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from q4core import PrepareContext, Request


class SilencesNan(ToyKernel):
    """Turns NaN and infinity into zero."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        return super().inputs(weight, torch.nan_to_num(x, 0.0, 0.0, 0.0), path)


class MutatesInput(ToyKernel):
    """Writes to x."""

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        super().linear(prepared, x, out, bias=bias, path=path)
        if bias is not None:  # the probe gives none, and would see the change
            x.view(-1)[0] = 0.0


class HalvesInput(ToyKernel):
    """Halves x in place and computes right from there: wrong for the caller, right beside what it leaves behind."""

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        super().linear(prepared, x.mul_(0.5), out, bias=bias, path=path)


class MutatesWeight(ToyKernel):
    """Writes to the caller's codes, once a bias is given: the probe gives none."""

    _source: PackedWeight | None = None

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        self._source = weight
        return super().prepare(weight, request, context)

    def add_bias(self, y: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._source is not None:
            self._source.qdata.view(-1)[-1] ^= 1
        return super().add_bias(y, bias)


class WritesBeside(ToyKernel):
    """Writes one element past the end of the result."""

    def write(self, y: torch.Tensor, out: torch.Tensor) -> None:
        super().write(y, out)
        after = out.storage_offset() + out.numel()
        if out.untyped_storage().nbytes() // out.element_size() > after:
            out.as_strided((1,), (1,), after).zero_()


class WritesBesideCodes(ToyKernel):
    """Writes one byte before the caller's codes while it prepares, as native code would, past torch."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        if weight.qdata.storage_offset():
            ctypes.memset(weight.qdata.data_ptr() - 1, 0, 1)
        return super().prepare(weight, request, context)


class SharedScratch(ToyKernel):
    """Keeps its result in the backend before it writes it: two threads meet there."""

    _scratch: torch.Tensor | None = None

    def write(self, y: torch.Tensor, out: torch.Tensor) -> None:
        self._scratch = y
        time.sleep(0.001)
        if self._scratch.shape == out.shape:
            out.copy_(self._scratch)
        else:
            out.zero_()


class SharedPlace(ToyKernel):
    """Keeps in the backend whose layer it works for: right for any number of threads that share one."""

    _place: Prepared | None = None

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        self._place = prepared
        time.sleep(0.001)
        super().linear(self._place, x, out, bias=bias, path=path)


class RaisesInCheck(ToyKernel):
    """Raises when it is asked."""

    def check(self, request: Request) -> Support:
        raise ZeroDivisionError(f"no idea what to do with {request.format}")


class RaisesInPrepare(ToyKernel):
    """Raises when it prepares."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        del weight, request, context
        raise MemoryError("a pretended lack of memory")


class PreparesFirstRange(ToyKernel):
    """Compiles, once for each path, for the rows that the first layer asked for, and fails with others."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._compiled: dict[str, Segment] = {}

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        for segment in context.paths:
            self._compiled.setdefault(segment.path.name, segment)
        return super().prepare(weight, request, context)

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        segment = self._compiled[path]
        if x.shape[0] < segment.low or (segment.high is not None and x.shape[0] > segment.high):
            raise LookupError(f"no code for {x.shape[0]} rows")
        super().linear(prepared, x, out, bias=bias, path=path)


class RefusesInPrepare(ToyKernel):
    """Offers a path for what its manifest declares, and finds only when it prepares that it has no compiler."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        del weight, request, context
        raise PrepareError([Reason(ReasonCode.TOOLCHAIN, "a pretended lack of compilers")])


class RefusesWithoutReason(ToyKernel):
    """Refuses to prepare, and does not say why."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        del weight, request, context
        raise PrepareError([])


class RaisesInLinear(Spoils):
    """Raises where M is 129."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] == 129:  # noqa: PLR2004  # far from where the probe looks
            raise IndexError("tile out of range")


class RefusesDeclared(ToyKernel):
    """Refuses a format that its manifest declares."""

    def check(self, request: Request) -> Support:
        if request.format.name == "nf4":
            return Support.no([Reason(ReasonCode.SHAPE, "not today")], native_state="numpy")
        return super().check(request)


class LeavesGap(ToyKernel):
    """Offers nothing for 17 … 32 rows."""

    def check(self, request: Request) -> Support:
        del request
        paths = [
            KernelPath("low", (1, 16), PathKind.KERNEL, Precision.W4A32, 20),
            KernelPath("high", (33, None), PathKind.KERNEL, Precision.W4A32, 20),
        ]
        return Support.yes(paths, native_state="numpy")


class Talks(Spoils):
    """Prints while it computes, and leaves its lines open."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        sys.stdout.write(f"result {y.shape}\nand no end of line")


class Crashes(Spoils):
    """Kills its process where M is 7."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] == 7:  # noqa: PLR2004  # far from where the probe looks
            os.kill(os.getpid(), signal.SIGSEGV)


class Hangs(Spoils):
    """Never comes back where M is 7."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] == 7:  # noqa: PLR2004  # far from where the probe looks
            threading.Event().wait()
