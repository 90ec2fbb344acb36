"""A right quantiser that rounds by chance, and faults planted in it."""
# ruff: noqa: D102 - what is overridden is documented in ToyQuantiser

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from q4_conformance.oracle.decoding import decode_scales
from q4_conformance_faults.toy import ToyKernel
from q4core import Packing, Rounding, pack_codes
from q4core import quantize as quantize_ref

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4core import PackedWeight, Request

__all__ = ["BiasedQuantiser", "IgnoresSeed", "LeakingQuantiser", "ToyQuantiser"]


class ToyQuantiser(ToyKernel):
    """The toy kernel with the reference as its quantiser, and rounding by chance on top of its scales."""

    def __init__(self, name: str = "toy-quantiser") -> None:
        super().__init__(name, ops={"linear", "quantize"}, roundings={Rounding.NEAREST, Rounding.STOCHASTIC})

    def quantize(
        self, dense: torch.Tensor, request: Request, *, rounding: Rounding = Rounding.NEAREST, seed: int = 0
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


class BiasedQuantiser(ToyQuantiser):
    """Goes up a little too often."""

    def shifted(self, chance: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where((chance > 0) & (chance < 1), chance + 0.02, chance)


class IgnoresSeed(ToyQuantiser):
    """Draws anew each time, whatever the seed."""

    def uniform(self, shape: tuple[int, ...], seed: int) -> NDArray[np.float64]:
        del seed
        return np.random.default_rng().random(shape)


class LeakingQuantiser(ToyQuantiser):
    """Keeps each weight that it quantised."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kept: list[PackedWeight] = []

    def quantize(
        self, dense: torch.Tensor, request: Request, *, rounding: Rounding = Rounding.NEAREST, seed: int = 0
    ) -> PackedWeight:
        weight = super().quantize(dense, request, rounding=rounding, seed=seed)
        self._kept.append(weight)
        return weight
