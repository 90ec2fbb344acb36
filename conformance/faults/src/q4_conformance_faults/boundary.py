"""Backends that break the contract where it is crossed: they give back junk, write to what is lent to them, or exit."""
# ruff: noqa: D102 - what is overridden is documented in ToyKernel

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.subjects.backend import make_registry
from q4_conformance_faults.numbers import Spoils, SwappedNibbles
from q4_conformance_faults.toy import ToyKernel
from q4core import (
    ActivationPrecision,
    KernelPath,
    PackedWeight,
    PathKind,
    Precision,
    Prepared,
    Session,
    SessionConfig,
    Support,
    Tier,
    dequantize,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from q4core import PrepareContext, Request


class WrongExport(ToyKernel):
    """Exports other scales than it was given."""

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        weight = super().export(prepared, rows)
        return attrs.evolve(weight, scale=weight.scale * 0.5)


class WrongExportLater(ToyKernel):
    """Exports other scales than it was given, once the self-probe has seen two right exports."""

    _exports = 0

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        weight = super().export(prepared, rows)
        self._exports += 1
        return weight if self._exports <= 2 else attrs.evolve(weight, scale=weight.scale * 0.5)  # noqa: PLR2004  # as it says


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

    def input_gradient(self, prepared: Prepared, grad: torch.Tensor, out: torch.Tensor, *, path: str) -> None:
        del path
        out.copy_(grad.to(torch.float32) @ dequantize(self.weight(prepared), torch.float32))


class WrongOwnGradient(Differentiates):
    """Computes input gradients of which the last column is zero."""

    def input_gradient(self, prepared: Prepared, grad: torch.Tensor, out: torch.Tensor, *, path: str) -> None:
        super().input_gradient(prepared, grad, out, path=path)
        out[:, -1] = 0


class WrongOwnGradientLater(Differentiates):
    """Computes the same, once the self-probe has seen three right ones."""

    _gradients = 0

    def input_gradient(self, prepared: Prepared, grad: torch.Tensor, out: torch.Tensor, *, path: str) -> None:
        super().input_gradient(prepared, grad, out, path=path)
        self._gradients += 1
        if self._gradients > 3:  # noqa: PLR2004  # as it says
            out[:, -1] = 0


class ExportsSortedRows(ToyKernel):
    """Exports the rows that are asked for in the order in which they are stored."""

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        return super().export(prepared, None if rows is None else rows.sort().values)


class ExportsJunk(ToyKernel):
    """Exports a mapping of tensors."""

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> Any:
        return dict(super().export(prepared, rows).tensors())


class ExportsTooFew(ToyKernel):
    """Leaves the last row out of what it exports."""

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        weight = super().export(prepared, rows)
        return weight.narrow(0, 0, weight.out_features - 1)


class CollapsesLevels(ToyKernel):
    """Exports resolved scales in place of the stored levels."""

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        return super().export(prepared, rows).with_plain_scale()


class PreparesNothing(ToyKernel):
    """Keeps the weight to itself, and gives no tensors."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        self._kept = super().prepare(weight, request, context)
        return Prepared((), self._kept.meta)

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        del prepared
        super().linear(self._kept, x, out, bias=bias, path=path)


class WritesCodes(ToyKernel):
    """Writes to the caller's codes before it prepares them, so that it agrees with the weight as it then is."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        weight.qdata.bitwise_xor_(0x11)
        return super().prepare(weight, request, context)


class WritesScales(ToyKernel):
    """Writes to the caller's scales by their address, which torch does not count, before it prepares them."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        weight.scale.numpy()[...] *= 2
        return super().prepare(weight, request, context)


class WritesLater(ToyKernel):
    """The same from the second weight on, which the core trusts as it was proven by the first."""

    _count = 0

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        prepared = super().prepare(weight, request, context)
        self._count += 1
        if self._count > 1:
            weight.scale.numpy()[...] *= 2
        return prepared


def namesake(name: str) -> ToyKernel:
    """Return a wrong backend of the name of a right one that is proven already, in another registry."""
    exact = SessionConfig(device="cpu", backend=name, activation_precision=ActivationPrecision.EXACT)
    Session(exact, registry=make_registry(ToyKernel(name))).linear(WeightRecipe(format="nf4").build())
    return SwappedNibbles(name)


class LeavesInCheck(ToyKernel):
    """Exits when it is asked."""

    def check(self, request: Request) -> Support:
        raise SystemExit(f"no licence for {request.format.name}")


class LeavesInPrepare(ToyKernel):
    """Exits when it prepares."""

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        del weight, request, context
        raise SystemExit("no compiler")


class LeavesInLinear(ToyKernel):
    """Exits when it computes."""

    def linear(self, prepared: Any, x: torch.Tensor, out: torch.Tensor, *, bias: Any, path: str) -> None:
        del prepared, x, out, bias, path
        raise SystemExit("no device")


class LeavesLater(Spoils):
    """Exits where M is 129."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] == 129:  # noqa: PLR2004  # far from where the probe looks
            raise SystemExit("tile out of range")


class LeavesInThreads(Spoils):
    """Exits in every thread but the main one."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        del y
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit("not at home")
