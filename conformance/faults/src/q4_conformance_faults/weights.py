"""Faults of decoding: codes, scales, offsets and other fields of a weight are read wrong."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance_faults.fault import NF4, numeric_fault
from q4_conformance_faults.toy import Floats, ToyKernel
from q4core import PackedWeight, Prepared, ScaleKind

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@numeric_fault("swapped-nibbles", f"TC-09/values/{NF4}/")
class SwappedNibbles(ToyKernel):
    """Reads each pair of nibbles the wrong way round."""

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        codes = super().codes(weight, start, stop)
        pairs = codes[:, : codes.shape[1] // 2 * 2].reshape(codes.shape[0], -1, 2)
        codes[:, : pairs.shape[1] * 2] = pairs[..., ::-1].reshape(codes.shape[0], -1)
        return codes


@numeric_fault("reciprocal-global", "TC-09/values/nvfp4-e4m3_mul-low_first-48x256b16-s0/", format="nvfp4")
class ReciprocalGlobal(ToyKernel):
    """Divides by the global scale where it must multiply, and the other way round."""

    def scales(self, weight: PackedWeight) -> Floats:
        flipped = {ScaleKind.E4M3_MUL: ScaleKind.E4M3_DIV, ScaleKind.E4M3_DIV: ScaleKind.E4M3_MUL}
        return super().scales(attrs.evolve(weight, scale_kind=flipped.get(weight.scale_kind, weight.scale_kind)))


@numeric_fault("scale-off-by-one-block", "TC-09/values/q4_0-plain-half_split32-48x256b32-s0/", format="q4_0")
class ScaleOffByOne(ToyKernel):
    """Uses the scale of the block before."""

    def scales(self, weight: PackedWeight) -> Floats:
        return np.roll(super().scales(weight), 1, axis=-1)


@numeric_fault("half-precision-scales", f"TC-09/values/{NF4}/")
class HalfPrecisionScales(ToyKernel):
    """Rounds scales to float16."""

    def scales(self, weight: PackedWeight) -> Floats:
        return super().scales(weight).astype(np.float16).astype(np.float32)


@numeric_fault("saturates-scales", "EX-10/edges/nf4-plain-high_first-48x256b64-edges-s0/float32")
class SaturatesScales(ToyKernel):
    """Takes scales beyond 448 for 448."""

    def scales(self, weight: PackedWeight) -> Floats:
        return super().scales(weight).clip(-448, 448)


@numeric_fault(
    "clips-by-activation-scale",
    "TC-09/static/nvfp4-e4m3_mul-low_first-48x256b16-activation9.54e-07-s0/float32/exact",
    format="nvfp4",
)
class ClipsByActivationScale(ToyKernel):
    """Clips x to what a static activation scale allows FP4 activations, on every path."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        values = super().inputs(weight, x, path)
        if weight.activation_scale is None:
            return values
        most = 6 * 448 * float(weight.activation_scale)
        return values.clip(-most, most)


@numeric_fault("ignores-offset", "TC-09/values/q4_1-plain-half_split32-48x256b32-s0/", format="q4_1")
class IgnoresOffset(ToyKernel):
    """Leaves the offset out."""

    def add_offset(self, weight: PackedWeight, dense: Floats, start: int, stop: int) -> Floats:
        return dense


class Ignores(ToyKernel):
    """Leaves out a field of the weight, as if the weight had none or the format's own."""

    def __init__(self, name: str, field: str) -> None:
        super().__init__(name)
        self._without: dict[str, Any] = {field: None}

    def weight(self, prepared: Prepared) -> PackedWeight:
        return attrs.evolve(super().weight(prepared), **self._without)


for _name, _field, _recipe in (
    ("zero-point", "zero", "int4-plain-low_first-48x256b128-zero_point-s0"),
    ("permutation", "input_permutation", "int4-plain-low_first-48x256b128-input_permutation-zero_point-s0"),
    ("channel-scale", "input_channel_scale", "int4-plain-low_first-48x256b128-input_channel_scale-s0"),
    ("codebook", "codebook", "nf4-plain-high_first-48x256b64-custom_codebook-s0"),
):
    _ignored = functools.partial(Ignores, field=_field)
    numeric_fault(f"ignores-{_name}", f"TC-09/values/{_recipe}/", format=_recipe.partition("-")[0])(_ignored)


@numeric_fault(
    "unrolls-levels-without-order",
    "TC-09/values/nf4-double_quant-high_first-48x256b64-input_channel_scale-input_permutation-s0/",
)
class UnrollsWithoutOrder(ToyKernel):
    """Forgets the order of in-features where scales have two levels."""

    def weight(self, prepared: Prepared) -> PackedWeight:
        found = super().weight(prepared)
        return found if found.scale_kind is ScaleKind.PLAIN else attrs.evolve(found, input_permutation=None)


@numeric_fault("drops-tail", "TC-11/awkward/int4-plain-low_first-7x33b128-s0/", format="int4")
class DropsTail(ToyKernel):
    """Leaves a short last block out."""

    def rows(self, weight: PackedWeight, scales: Floats, start: int, stop: int) -> Floats:
        dense = super().rows(weight, scales, start, stop)
        dense[:, weight.in_features // weight.block_size * weight.block_size :] = 0
        return dense


@numeric_fault("takes-scales-for-half", "TC-09/values/nf4-plain-high_first-48x256b64-scale_bfloat16-s0/float32/exact")
class TakesScalesForHalf(ToyKernel):
    """Takes the bytes of bfloat16 scales for float16."""

    def scales(self, weight: PackedWeight) -> Floats:
        if weight.scale.dtype is torch.bfloat16 and weight.scale_kind is ScaleKind.PLAIN:
            weight = attrs.evolve(weight, scale=weight.scale.view(torch.float16))
        return super().scales(weight)


@numeric_fault("counts-blocks-in-bytes", "TC-09/values/nf4-plain-high_first-5x1024b512-s0/float32/exact")
class CountsBlocksInBytes(ToyKernel):
    """Counts within a block in 8 bits."""

    def spread(self, weight: PackedWeight, numbers: NDArray[Any], start: int, stop: int) -> Floats:
        spread = super().spread(weight, numbers, start, stop)
        return spread if weight.block_size <= 256 else np.roll(spread, 256, axis=1)  # noqa: PLR2004  # 8 bits
