"""A right quantiser that rounds by chance, a path of 4-bit activations, and their faults; who is picked."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel and ToyQuantiser document the rest

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance.oracle.decoding import decode_scales
from q4_conformance_faults.fault import backend_fault, device_fault
from q4_conformance_faults.toy import Floats, ToyKernel
from q4core import KernelPath, Packing, PathKind, Precision, Rounding, Support, Tier, pack_codes
from q4core import quantize as quantize_ref

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from q4core import PackedWeight, Request


class ToyQuantiser(ToyKernel):
    """The toy kernel with the reference as its quantiser, and rounding by chance on top of its scales."""

    def __init__(self, name: str = "toy-quantiser") -> None:
        super().__init__(name, ops={"linear", "quantize"}, roundings={Rounding.NEAREST, Rounding.STOCHASTIC})

    def quantize(
        self, dense: Tensor, request: Request, *, rounding: Rounding = Rounding.NEAREST, seed: int = 0
    ) -> PackedWeight:
        """Return the reference's scales, with codes rounded as asked for."""
        weight = quantize_ref(dense, request.format.name)
        if rounding is Rounding.NEAREST:
            return weight
        levels = np.asarray(request.format.codebook, np.float64)
        order = np.argsort(levels, kind="stable")
        rising = levels[order]
        scaled = dense.double().numpy() / np.repeat(decode_scales(weight).astype(np.float64), weight.block_size, axis=1)
        below = np.clip(np.searchsorted(rising, scaled, side="right") - 1, 0, len(rising) - 2)
        chance = (scaled - rising[below]) / np.maximum(rising[below + 1] - rising[below], np.finfo(float).tiny)
        codes = order[below + (self.uniform(chance.shape, seed) < self.shifted(chance))]
        packed = pack_codes(torch.from_numpy(codes.astype(np.uint8)), Packing.LOW_FIRST)
        return attrs.evolve(weight, qdata=packed, packing=Packing.LOW_FIRST)

    def uniform(self, shape: tuple[int, ...], seed: int) -> NDArray[np.float64]:
        """Return the draws of a seed."""
        return np.random.default_rng(seed).random(shape)

    def shifted(self, chance: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the chance of going up."""
        return chance


@backend_fault("rounds-with-bias", "EX-13/stochastic", "standard deviations", format="mxfp4")
class BiasedQuantiser(ToyQuantiser):
    """Goes up a little too often."""

    def shifted(self, chance: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where((chance > 0) & (chance < 1), chance + 0.02, chance)


@backend_fault("ignores-its-seed", "EX-13/stochastic", "the same seed", format="mxfp4")
class IgnoresSeed(ToyQuantiser):
    """Draws anew each time, for every seed."""

    def uniform(self, shape: tuple[int, ...], seed: int) -> NDArray[np.float64]:
        return np.random.default_rng().random(shape)


@backend_fault("leaks-quantised", "TC-18/quantiser", "memory grew by", format="mxfp4")
class LeakingQuantiser(ToyQuantiser):
    """Keeps each weight that it quantised."""

    def quantize(self, dense: Tensor, request: Request, **how: Any) -> PackedWeight:
        weight = super().quantize(dense, request, **how)
        self.held[len(self.held)] = weight
        return weight


@device_fault("rounds-halves-up", "TC-14/quantiser", "bytes of qdata differ from the reference's")
class RoundsHalvesUp(ToyQuantiser):
    """Rounds each pair with a tie in it to other codes."""

    def quantize(self, dense: Tensor, request: Request, **how: Any) -> PackedWeight:
        weight = super().quantize(dense, request, **how)
        halves = (dense.abs().mul(4) % 1 == 0).reshape(dense.shape[0], -1, 2).any(-1)
        return attrs.evolve(weight, qdata=torch.where(halves, weight.qdata ^ 1, weight.qdata))


@device_fault("forgets-its-scales", "TC-14/quantiser", "bytes of scale differ from the reference's")
class ForgetsScales(ToyQuantiser):
    """Leaves every scale at zero."""

    def quantize(self, dense: Tensor, request: Request, **how: Any) -> PackedWeight:
        weight = super().quantize(dense, request, **how)
        return attrs.evolve(weight, scale=torch.zeros_like(weight.scale.view(torch.uint8)).view(weight.scale.dtype))


@device_fault("gives-dense-weights", "TC-14/quantiser", "Tensor instead of a PackedWeight")
class GivesDense(ToyQuantiser):
    """Gives the dense weight back."""

    def quantize(self, dense: Tensor, request: Request, **how: Any) -> Any:
        return dense


class FourBits(ToyKernel):
    """The toy kernel with a path that may round activations to four bits, and does not."""

    def __init__(self, name: str = "toy-four-bits") -> None:
        super().__init__(name, precisions={Precision.W4A32, Precision.W4A16, Precision.W4A4})

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        path = KernelPath("dot_w4a4", (1, None), PathKind.KERNEL, Precision.W4A4, Tier.TUNED)
        return Support.yes([*verdict.paths, path], native_state="numpy")


@device_fault("drops-a-row-of-four-bits", "TC-15/product", "M = 33: out_of_bound")
class DropsLastRow(FourBits):
    """Leaves the last of 33 rows at zero where activations have four bits."""

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        y = super().product(weight, scales, x, path)
        if path == "dot_w4a4" and y.shape[0] == 33:  # noqa: PLR2004  # far from where the probe looks
            y[-1] = 0
        return y


@device_fault("kernel-below-the-reference", "TC-16/picked", "'dequant-fallback' serves")
class Lowest(ToyKernel):
    """Offers its kernels below the reference's tier."""

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        return attrs.evolve(verdict, paths=[attrs.evolve(path, tier=-1) for path in verdict.paths])
