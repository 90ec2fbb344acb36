"""Backends whose numbers are wrong, and at the end bare functions with faults that the core lets no backend have."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance_faults.fault import NF4, backend_fault, function_fault, numeric_fault
from q4_conformance_faults.toy import Floats, ToyKernel, function_of
from q4core import PackedWeight, Prepared, ScaleKind, Support

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from q4core import Request


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


@numeric_fault("half-precision-sums", "TC-09/values/mxfp4-e8m0-low_first-48x256b32-s0/", format="mxfp4")
class HalfPrecisionSums(ToyKernel):
    """Accumulates in float16."""

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        total = np.zeros((values.shape[0], dense.shape[0]), np.float16)
        for k in range(values.shape[1]):
            total += (values[:, k, None] * dense[None, :, k]).astype(np.float16)
        return total.astype(np.float32)


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


@numeric_fault("drops-tail", "TC-11/awkward/int4-plain-low_first-7x33b128-s0/", format="int4")
class DropsTail(ToyKernel):
    """Leaves a short last block out."""

    def rows(self, weight: PackedWeight, scales: Floats, start: int, stop: int) -> Floats:
        dense = super().rows(weight, scales, start, stop)
        dense[:, weight.in_features // weight.block_size * weight.block_size :] = 0
        return dense


@numeric_fault("ignores-bias", "TC-09/bias", "out_of_bound")
class IgnoresBias(ToyKernel):
    """Leaves the bias out."""

    def add_bias(self, y: Floats, bias: Floats) -> Floats:
        return y


@numeric_fault("rounds-before-bias", "TC-09/bias", "out_of_bound")
class RoundsBeforeBias(ToyKernel):
    """Rounds twice: before the bias is added, and after."""

    def add_bias(self, y: Floats, bias: Floats) -> Floats:
        rounded = torch.from_numpy(y).to(torch.bfloat16).to(torch.float32).numpy()
        return super().add_bias(rounded, bias)


class Spoils(ToyKernel):
    """Changes the result where a number of rows meets a condition."""

    def spoil(self, y: Floats) -> None:
        raise NotImplementedError

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        y = super().product(weight, scales, x, path)
        self.spoil(y)
        return y


@numeric_fault("one-zeroed-element", "EX-01/rows", "1 of 6144 elements")
class OneZero(Spoils):
    """Zeroes one element where M is 128."""

    def spoil(self, y: Floats) -> None:
        if y.shape[0] == 128:  # noqa: PLR2004  # far from where the probe looks
            y[101, y.shape[1] // 2] = 0


@numeric_fault("forgets-a-corner", "EX-01/shapes", "out_of_bound: 1 of")
class ForgetsCorner(Spoils):
    """Zeroes the last element where M is from 19 to 31 and N is odd."""

    def spoil(self, y: Floats) -> None:
        if 19 <= y.shape[0] < 32 and y.shape[1] % 2:  # noqa: PLR2004  # far from where the probe looks
            y[-1, -1] = 0


@numeric_fault("all-zero-for-m-17", "EX-01/rows", format="q8_0")
class AllZero17(Spoils):
    """Gives zeros where M is 17, where a path begins, and the probe looks."""

    _rows = 17

    def spoil(self, y: Floats) -> None:
        if len(y) == self._rows:
            y[:] = 0


@numeric_fault("all-zero-for-m-127", "EX-01/rows", "all_zero", format="q8_0")
class AllZero127(AllZero17):
    """Gives zeros where M is 127, far from where the probe looks."""

    _rows = 127


@backend_fault("wrong-tile-for-many-rows", "EX-01/rows")
class WrongTile(Spoils):
    """Computes with another tile from 200 rows on, which is wrong, and names that number for the probe."""

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        paths = [
            attrs.evolve(path, probe_rows=(200,)) if path.name.startswith("gemm") else path for path in verdict.paths
        ]
        return Support.yes(paths, native_state=verdict.native_state)

    def spoil(self, y: Floats) -> None:
        if y.shape[0] >= 200:  # noqa: PLR2004  # beyond every case, and where the probe looks only if it is told
            y[:, -1] *= np.float32(1.125)


@numeric_fault("nan-output", "EX-01/rows", "non_finite", format="nvfp4")
class Nan(Spoils):
    """Gives one NaN where M is 7."""

    def spoil(self, y: Floats) -> None:
        if y.shape[0] == 7:  # noqa: PLR2004  # far from where the probe looks
            y[3, 5] = np.nan


@numeric_fault("swaps-rows", f"TC-09/values/{NF4}/", "out_of_bound")
class SwapsRows(Spoils):
    """Swaps two rows where M is 5."""

    def spoil(self, y: Floats) -> None:
        if y.shape[0] == 5:  # noqa: PLR2004  # far from where the probe looks
            y[[1, 2]] = y[[2, 1]]


@numeric_fault("not-deterministic", "EX-03/repeat", "other bits")
class Noise(Spoils):
    """Differs from call to call, far inside the bound."""

    def spoil(self, y: Floats) -> None:
        y *= np.float32(1) + np.float32(2.0**-22) * np.random.default_rng().choice([-1, 0, 1], size=y.shape)


@numeric_fault("hidden-int8", f"TC-09/values/{NF4}/")
class HiddenInt8(ToyKernel):
    """Quantises the activations to int8 on a path that says it does not."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return self.quantised(super().inputs(weight, x, path))


@numeric_fault("hidden-int8-in-bfloat16", f"EX-01/rows/{NF4}/bfloat16/exact", "M = 127: out_of_bound")
@numeric_fault("hidden-int8-unprobed", f"EX-01/noise/{NF4}/float32/exact", "noisy")
class HiddenInt8Between(ToyKernel):
    """The same for 40 and 127 rows alone."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        values = super().inputs(weight, x, path)
        return self.quantised(values) if x.shape[0] in {40, 127} else values  # far from where the probe looks


@numeric_fault("rounds-input", f"TC-09/values/{NF4}/float32")
class RoundsInput(ToyKernel):
    """Rounds float32 activations to bfloat16 on a path that says it does not."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return super().inputs(weight, x.to(torch.bfloat16), path)


@function_fault("wrong-out-dtype", "TC-09/values", "must be torch.bfloat16, got torch.float32")
def _float32_always(x: Tensor, weight: PackedWeight, bias: Tensor | None, **out: Any) -> Tensor:
    del out
    return function_of(ToyKernel())(x.to(torch.float32), weight, bias)


@function_fault("ignores-out", "TC-09/out", "non_finite")
def _ignores_out(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    y = function_of(ToyKernel())(x, weight, bias)
    return y if out is None else out


@function_fault("forgets-leading-dimensions", "TC-09/leading", "gave")
def _forgets_leading(x: Tensor, weight: PackedWeight, bias: Tensor | None, **out: Any) -> Tensor:
    return function_of(ToyKernel())(x.reshape(-1, x.shape[-1]), weight, bias, **out)


@function_fault("drops-gradients", "EX-05/gradient", "does not require gradients")
def _drops_gradients(x: Tensor, weight: PackedWeight, bias: Tensor | None, **out: Any) -> Tensor:
    return function_of(ToyKernel())(x.detach(), weight, bias, **out)


@function_fault("zero-gradients", "EX-05/gradient", "all_zero")
def _zero_gradients(x: Tensor, weight: PackedWeight, bias: Tensor | None, **out: Any) -> Tensor:
    y = function_of(ToyKernel())(x.detach(), weight, bias, **out)
    return y + (x * 0).sum().to(y.dtype) if x.requires_grad else y
