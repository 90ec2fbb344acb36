"""Backends that break the contract where it is crossed: they give back junk, write to what is lent to them, or exit."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.subjects.backend import make_registry
from q4_conformance_faults.fault import NF4, TAIL, backend_fault, numeric_fault
from q4_conformance_faults.toy import Floats, Spoils, ToyKernel
from q4_conformance_faults.weights import SwappedNibbles
from q4core import (
    ActivationPrecision,
    KernelPath,
    PackedWeight,
    PathKind,
    Precision,
    Prepared,
    PrepareError,
    Reason,
    ReasonCode,
    Session,
    SessionConfig,
    Support,
    Tier,
    dequantize,
)

if TYPE_CHECKING:
    from torch import Tensor

    from q4core import Request

_GRADIENT = "EX-05/gradient/q4_0-plain-half_split32-67x96b32-s0/float32/exact"


@backend_fault("wrong-export", "EX-16/export", format="q4_0")
class WrongExport(ToyKernel):
    """Exports other scales than it was given, once it has exported some right ones."""

    right, factor = 0, 0.5

    def export(self, prepared: Prepared, rows: Tensor | None = None) -> PackedWeight:
        weight = super().export(prepared, rows)
        self.right -= 1
        return weight if self.right >= 0 else attrs.evolve(weight, scale=weight.scale * self.factor)


@backend_fault("sends-other-scales", "EX-15/elsewhere", "in the other process the weight differs in its scales")
@backend_fault("wrong-export-later", "EX-16/export", "its scales", format="q4_0")
@backend_fault("wrong-gradient", _GRADIENT, "gradient: ", format="q4_0")
class WrongExportLater(WrongExport):
    """The same, once the self-probe has seen two right exports."""

    right = 2


@backend_fault("drops-gradients", f"EX-05/gradient/{TAIL}/float32", "all_zero")
class DropsGradients(WrongExportLater):
    """Exports zero scales in place of the others, so that no gradient comes through."""

    factor = 0.0


class Differentiates(ToyKernel):
    """Computes input gradients, right."""

    def __init__(self, name: str) -> None:
        super().__init__(name, ops={"linear", "input_gradient"})

    def check(self, request: Request) -> Support:
        if request.op == "linear":
            return super().check(request)
        exact = Precision.W4A32 if request.out_dtype == torch.float32 else Precision.W4A16
        path = KernelPath("gradient", (1, None), PathKind.KERNEL, exact, Tier.GENERIC)
        return Support.yes([path], native_state="numpy")

    def input_gradient(self, prepared: Prepared, grad: Tensor, out: Tensor, *, path: str) -> None:
        out.copy_(grad.to(torch.float32) @ dequantize(self.weight(prepared), torch.float32))


@backend_fault("wrong-own-gradient", "EX-05/gradient", format="q4_0")
class WrongOwnGradient(Differentiates):
    """Computes input gradients of which the last column is zero, once it has computed some right ones."""

    right = 0

    def input_gradient(self, prepared: Prepared, grad: Tensor, out: Tensor, *, path: str) -> None:
        super().input_gradient(prepared, grad, out, path=path)
        self.right -= 1
        if self.right < 0:
            out[:, -1] = 0


@backend_fault("wrong-own-gradient-later", _GRADIENT, "gradient: ", format="q4_0")
class WrongOwnGradientLater(WrongOwnGradient):
    """The same, once the self-probe has seen three right ones."""

    right = 3


@backend_fault("exports-sorted-rows", "EX-16/export", format="q4_0")
class ExportsSortedRows(ToyKernel):
    """Exports the rows that are asked for in the order in which they are stored."""

    def export(self, prepared: Prepared, rows: Tensor | None = None) -> PackedWeight:
        return super().export(prepared, None if rows is None else rows.sort().values)


@backend_fault("exports-junk", "EX-16/export", "must be a PackedWeight", format="q4_0", passes_probe=False)
class ExportsJunk(ToyKernel):
    """Exports a mapping of tensors."""

    def export(self, prepared: Prepared, rows: Tensor | None = None) -> Any:
        return dict(super().export(prepared, rows).tensors())


@backend_fault("exports-too-few-rows", "EX-16/export", "one of (47, 256)", format="q4_0", passes_probe=False)
class ExportsTooFew(ToyKernel):
    """Leaves the last row out of what it exports."""

    def export(self, prepared: Prepared, rows: Tensor | None = None) -> PackedWeight:
        weight = super().export(prepared, rows)
        return weight.narrow(0, 0, weight.out_features - 1)


@backend_fault("collapses-levels", "EX-16/export", "collapsed", format="nvfp4")
class CollapsesLevels(ToyKernel):
    """Exports resolved scales in place of the stored levels."""

    def export(self, prepared: Prepared, rows: Tensor | None = None) -> PackedWeight:
        return super().export(prepared, rows).with_plain_scale()


@backend_fault("prepares-nothing", "TC-04/override", "at least one tensor")
class PreparesNothing(ToyKernel):
    """Keeps the weight to itself, and gives no tensors."""

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        self._own = prepared
        return Prepared((), prepared.meta)

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(self._own, x, out, bias=bias, path=path)


@numeric_fault("writes-codes-in-prepare", "EX-08/unmodified", "changed the caller's weight")
class WritesCodes(ToyKernel):
    """Writes to the caller's codes before it prepares them, so that it agrees with the weight as it then is."""

    def on_prepare(self, weight: PackedWeight) -> None:
        weight.qdata.bitwise_xor_(0x11)


@numeric_fault("writes-scales-in-prepare", f"TC-09/values/{NF4}/", "changed the caller's weight")
class WritesScales(ToyKernel):
    """Writes to the caller's scales by their address, which torch does not count, before it prepares them."""

    def on_prepare(self, weight: PackedWeight) -> None:
        weight.scale.numpy()[...] *= 2


@numeric_fault("writes-in-later-prepare", "EX-08/unmodified", "weight was written: scale")
class WritesLater(ToyKernel):
    """The same from the second weight on, which the core trusts as it was proven by the first."""

    _count = 0

    def prepared(self, weight: PackedWeight, prepared: Prepared) -> Prepared:
        self._count += 1
        if self._count > 1:
            weight.scale.numpy()[...] *= 2
        return prepared


@backend_fault("namesake-of-a-proven-one", f"TC-09/values/{NF4}/float32/exact")
def namesake(name: str) -> ToyKernel:
    """Return a wrong backend of the name of a right one that is proven already, in another registry."""
    exact = SessionConfig(device="cpu", backend=name, activation_precision=ActivationPrecision.EXACT)
    Session(exact, registry=make_registry(ToyKernel(name))).linear(WeightRecipe(format="nf4").build())
    return SwappedNibbles(name)


class Raises(ToyKernel):
    """Raises an error when it is asked, when it prepares, when it computes, or where M is 129, far from the probe."""

    def __init__(self, name: str, *, where: str, error: BaseException) -> None:
        super().__init__(name)
        self._where, self._error = where, error

    def _reach(self, where: str) -> None:
        if where == self._where:
            raise self._error

    def check(self, request: Request) -> Support:
        self._reach("check")
        return super().check(request)

    def on_prepare(self, weight: PackedWeight) -> None:
        self._reach("prepare")

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        self._reach("linear")
        self._reach(f"M = {len(x)}")
        super().linear(prepared, x, out, bias=bias, path=path)


_TOOLCHAIN = Reason(ReasonCode.TOOLCHAIN, "a pretended lack of compilers")
for _name, _case, _says, _error in (
    ("leaves-in-check", f"TC-09/values/{NF4}/", "check raised SystemExit", SystemExit("no licence")),
    ("leaves-in-prepare", f"TC-09/values/{NF4}/", "prepare raised SystemExit", SystemExit("no compiler")),
    ("raises-in-check", "TC-04/override", "check raised", ZeroDivisionError("no idea")),
    ("raises-in-prepare", "TC-04/override", "prepare raised", MemoryError("a pretended lack of memory")),
    ("refuses-in-prepare", "TC-04/override", f"toolchain: {_TOOLCHAIN.message}", PrepareError([_TOOLCHAIN])),
    ("refuses-without-reason", "TC-04/override", "plugin_error: prepare refused without a Reason", PrepareError([])),
):
    _where = "check" if _name.endswith("check") else "prepare"
    backend_fault(_name, _case, _says)(functools.partial(Raises, where=_where, error=_error))
_exits = functools.partial(Raises, where="linear", error=SystemExit("no device"))
numeric_fault("leaves-in-linear", f"TC-09/values/{NF4}/", "raised SystemExit: no device", passes_probe=False)(_exits)
for _name, _says, _late in (
    ("leaves-in-a-later-linear", "SystemExit", SystemExit("tile out of range")),
    ("raises-in-linear", "tile out of range", IndexError("tile out of range")),
):
    numeric_fault(_name, "EX-01/rows", _says)(functools.partial(Raises, where="M = 129", error=_late))


@numeric_fault("leaves-in-threads", "EX-04/threads", "SystemExit: not at home")
class LeavesInThreads(Spoils):
    """Exits in every thread but the main one."""

    def spoil(self, y: Floats) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit("not at home")
