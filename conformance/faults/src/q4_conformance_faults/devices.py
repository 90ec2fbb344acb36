"""Faults of what the cases of devices judge: quantisers, products of 4-bit activations, and who is picked."""
# ruff: noqa: D102 - what is overridden is documented in ToyKernel

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance_faults.fault import Fault
from q4_conformance_faults.quantisers import ToyQuantiser
from q4_conformance_faults.toy import ToyKernel
from q4core import KernelPath, PathKind, Precision, Rounding, Support, Tier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from q4core import PackedWeight, Request

__all__ = ["DEVICE_FAULTS", "FourBits"]


class RoundsHalvesUp(ToyQuantiser):
    """Rounds each pair with a tie in it to other codes."""

    def quantize(
        self, dense: torch.Tensor, request: Request, *, rounding: Rounding = Rounding.NEAREST, seed: int = 0
    ) -> PackedWeight:
        weight = super().quantize(dense, request, rounding=rounding, seed=seed)
        halves = (dense.abs().mul(4) % 1 == 0).reshape(dense.shape[0], -1, 2).any(-1)
        return attrs.evolve(weight, qdata=torch.where(halves, weight.qdata ^ 1, weight.qdata))


class ForgetsScales(ToyQuantiser):
    """Leaves every scale at zero."""

    def quantize(
        self, dense: torch.Tensor, request: Request, *, rounding: Rounding = Rounding.NEAREST, seed: int = 0
    ) -> PackedWeight:
        weight = super().quantize(dense, request, rounding=rounding, seed=seed)
        return attrs.evolve(weight, scale=torch.zeros_like(weight.scale.view(torch.uint8)).view(weight.scale.dtype))


class GivesDense(ToyQuantiser):
    """Gives the dense weight back."""

    def quantize(
        self, dense: torch.Tensor, request: Request, *, rounding: Rounding = Rounding.NEAREST, seed: int = 0
    ) -> Any:
        del request, rounding, seed
        return dense


class FourBits(ToyKernel):
    """The toy kernel with a path that may round activations to four bits, and does not."""

    def __init__(self, name: str = "toy-four-bits") -> None:
        super().__init__(name, precisions={Precision.W4A32, Precision.W4A16, Precision.W4A4})

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        path = KernelPath("dot_w4a4", (1, None), PathKind.KERNEL, Precision.W4A4, Tier.TUNED)
        return Support.yes([*verdict.paths, path], native_state="numpy")


class DropsLastRow(FourBits):
    """Leaves the last of 33 rows at zero where activations have four bits."""

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        y = super().product(weight, scales, x, path)
        if path == "dot_w4a4" and y.shape[0] == 33:  # noqa: PLR2004  # far from where the probe looks
            y[-1] = 0
        return y


class Lowest(ToyKernel):
    """Offers its kernels below the reference's tier."""

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        return attrs.evolve(verdict, paths=[attrs.evolve(path, tier=-1) for path in verdict.paths])


DEVICE_FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=f"fault-{name}", make=make, format="nvfp4", caught_by=case, says=says, is_numeric=False)
    for name, make, case, says in (
        ("rounds-halves-up", RoundsHalvesUp, "TC-14/quantiser", "bytes of qdata differ from the reference's"),
        ("forgets-its-scales", ForgetsScales, "TC-14/quantiser", "bytes of scale differ from the reference's"),
        ("gives-dense-weights", GivesDense, "TC-14/quantiser", "Tensor instead of a PackedWeight"),
        ("drops-a-row-of-four-bits", DropsLastRow, "TC-15/product", "M = 33: out_of_bound"),
        ("kernel-below-the-reference", Lowest, "TC-16/picked", "'dequant-fallback' serves"),
    )
)
"""They are judged on the CPU as well, by cases that otherwise run on a CUDA device alone."""
