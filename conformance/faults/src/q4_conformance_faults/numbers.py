"""Backends whose numbers are wrong."""
# ruff: noqa: D102 - what is overridden is documented in ToyKernel

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from q4_conformance_faults.toy import ToyKernel
from q4core import PackedWeight, Prepared, ScaleKind, Support

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from q4core import Request


class SwappedNibbles(ToyKernel):
    """Reads each pair of nibbles the wrong way round."""

    def codes(self, weight: PackedWeight, start: int, stop: int) -> NDArray[np.uint8]:
        codes = super().codes(weight, start, stop)
        pairs = codes[:, : codes.shape[1] // 2 * 2].reshape(codes.shape[0], -1, 2)
        codes[:, : pairs.shape[1] * 2] = pairs[..., ::-1].reshape(codes.shape[0], -1)
        return codes


class ReciprocalGlobal(ToyKernel):
    """Divides by the global scale where it must multiply, and the other way round."""

    def scales(self, weight: PackedWeight) -> NDArray[np.float32]:
        flipped = {ScaleKind.E4M3_MUL: ScaleKind.E4M3_DIV, ScaleKind.E4M3_DIV: ScaleKind.E4M3_MUL}
        return super().scales(attrs.evolve(weight, scale_kind=flipped.get(weight.scale_kind, weight.scale_kind)))


class ScaleOffByOne(ToyKernel):
    """Uses the scale of the block before."""

    def scales(self, weight: PackedWeight) -> NDArray[np.float32]:
        return np.roll(super().scales(weight), 1, axis=-1)


class HalfPrecisionScales(ToyKernel):
    """Rounds scales to float16."""

    def scales(self, weight: PackedWeight) -> NDArray[np.float32]:
        return super().scales(weight).astype(np.float16).astype(np.float32)


class SaturatesScales(ToyKernel):
    """Takes scales beyond 448 for 448."""

    def scales(self, weight: PackedWeight) -> NDArray[np.float32]:
        return super().scales(weight).clip(-448, 448)


class ClipsByActivationScale(ToyKernel):
    """Clips x to what a static activation scale allows FP4 activations, on every path."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        values = super().inputs(weight, x, path)
        if weight.activation_scale is None:
            return values
        most = 6 * 448 * float(weight.activation_scale)
        return values.clip(-most, most)


class HalfPrecisionSums(ToyKernel):
    """Accumulates in float16."""

    def accumulate(self, values: NDArray[np.float32], dense: NDArray[np.float32]) -> NDArray[np.float32]:
        total = np.zeros((values.shape[0], dense.shape[0]), np.float16)
        for k in range(values.shape[1]):
            total += (values[:, k, None] * dense[None, :, k]).astype(np.float16)
        return total.astype(np.float32)


class IgnoresOffset(ToyKernel):
    """Leaves the offset out."""

    def add_offset(
        self, weight: PackedWeight, dense: NDArray[np.float32], start: int, stop: int
    ) -> NDArray[np.float32]:
        del weight, start, stop
        return dense


class IgnoresZeroPoint(ToyKernel):
    """Takes every zero point for 8."""

    def weight(self, prepared: Prepared) -> PackedWeight:
        return attrs.evolve(super().weight(prepared), zero=None)


class IgnoresPermutation(ToyKernel):
    """Leaves the permutation of the in-features out."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        return super().inputs(attrs.evolve(weight, input_permutation=None), x, path)


class IgnoresChannelScale(ToyKernel):
    """Leaves the scale of the input channels out."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        return super().inputs(attrs.evolve(weight, input_channel_scale=None), x, path)


class IgnoresCodebook(ToyKernel):
    """Takes the format's codebook for the weight's own."""

    def weight(self, prepared: Prepared) -> PackedWeight:
        return attrs.evolve(super().weight(prepared), codebook=None)


class DropsTail(ToyKernel):
    """Leaves a short last block out."""

    def rows(self, weight: PackedWeight, scales: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
        dense = super().rows(weight, scales, start, stop)
        dense[:, weight.in_features // weight.block_size * weight.block_size :] = 0
        return dense


class IgnoresBias(ToyKernel):
    """Leaves the bias out."""

    def add_bias(self, y: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
        del bias
        return y


class RoundsBeforeBias(ToyKernel):
    """Rounds twice: before the bias is added, and after."""

    def add_bias(self, y: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
        rounded = torch.from_numpy(y).to(torch.bfloat16).to(torch.float32).numpy()
        return super().add_bias(rounded, bias)


class Spoils(ToyKernel):
    """Changes the result where a number of rows meets a condition."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        raise NotImplementedError

    def product(
        self, weight: PackedWeight, scales: NDArray[np.float32], x: torch.Tensor, path: str
    ) -> NDArray[np.float32]:
        y = super().product(weight, scales, x, path)
        self.spoil(y)
        return y


class OneZero(Spoils):
    """Zeroes one element where M is 128."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] == 128:  # noqa: PLR2004  # far from where the probe looks
            y[101, y.shape[1] // 2] = 0


class ForgetsCorner(Spoils):
    """Zeroes the last element where M is from 19 to 31 and N is odd."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if 19 <= y.shape[0] < 32 and y.shape[1] % 2:  # noqa: PLR2004  # far from where the probe looks
            y[-1, -1] = 0


class AllZero17(Spoils):
    """Gives zeros where M is 17."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] == 17:  # noqa: PLR2004  # where a path begins, and the probe looks
            y[:] = 0


class AllZero127(Spoils):
    """Gives zeros where M is 127."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] == 127:  # noqa: PLR2004  # far from where the probe looks
            y[:] = 0


class WrongTile(Spoils):
    """Computes with another tile from 200 rows on, which is wrong, and names that number for the probe."""

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        paths = [
            attrs.evolve(path, probe_rows=(200,)) if path.name.startswith("gemm") else path for path in verdict.paths
        ]
        return Support.yes(paths, native_state=verdict.native_state)

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] >= 200:  # noqa: PLR2004  # beyond every case, and where the probe looks only if it is told
            y[:, -1] *= np.float32(1.125)


class Nan(Spoils):
    """Gives one NaN where M is 7."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] == 7:  # noqa: PLR2004  # far from where the probe looks
            y[3, 5] = np.nan


class SwapsRows(Spoils):
    """Swaps two rows where M is 5."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        if y.shape[0] == 5:  # noqa: PLR2004  # far from where the probe looks
            y[[1, 2]] = y[[2, 1]]


class Noise(Spoils):
    """Differs from call to call, far inside the bound."""

    def spoil(self, y: NDArray[np.float32]) -> None:
        y *= np.float32(1) + np.float32(2.0**-22) * np.random.default_rng().choice([-1, 0, 1], size=y.shape)


class HiddenInt8(ToyKernel):
    """Quantises the activations to int8 on a path that says it does not."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        return self.quantised(super().inputs(weight, x, path))


class HiddenInt8Between(ToyKernel):
    """The same for 40 and 127 rows alone."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        values = super().inputs(weight, x, path)
        return self.quantised(values) if x.shape[0] in {40, 127} else values  # far from where the probe looks


class RoundsInput(ToyKernel):
    """Rounds float32 activations to bfloat16 on a path that says it does not."""

    def inputs(self, weight: PackedWeight, x: torch.Tensor, path: str) -> NDArray[np.float32]:
        return super().inputs(weight, x.to(torch.bfloat16), path)
