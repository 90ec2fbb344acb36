"""Faults of arithmetic: precision, bias, rounding, special values and determinism; those of bare functions."""
# ruff: noqa: ARG002, ARG005, D102 - a fault looks at some of what it is given; ToyKernel documents what is overridden

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance_faults.fault import LONG, NF4, backend_fault, function_fault, numeric_fault
from q4_conformance_faults.toy import Calls, Floats, Spoils, ToyKernel, function_of
from q4core import KernelPath, PackedWeight, PathKind, Precision, Prepared, Support, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from q4core import Request

_VECTOR = 8
_ROWS = 4096


@numeric_fault("half-precision-sums", "TC-09/values/mxfp4-e8m0-low_first-48x256b32-s0/", format="mxfp4")
class HalfPrecisionSums(ToyKernel):
    """Accumulates in float16."""

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        total = np.zeros((values.shape[0], dense.shape[0]), np.float16)
        for k in range(values.shape[1]):
            total += (values[:, k, None] * dense[None, :, k]).astype(np.float16)
        return total.astype(np.float32)


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


@backend_fault("leaves-zero-rows-out", f"EX-10/zeros/{NF4}/float32/exact", "non_finite")
class LeavesZeroRowsOut(Calls):
    """Takes rows of zeros for padding."""

    def after(self, x: Tensor, out: Tensor, before: Tensor) -> None:
        zero = (x == 0).all(dim=1)
        out[zero] = before[zero]


@backend_fault("divides-by-zero-blocks", f"EX-10/zeros/{NF4}/float32/int8", "non_finite")
class DividesByZeroBlocks(ToyKernel):
    """Makes NaN of int8 blocks that are all zeros, by the largest of them."""

    def quantised(self, values: Floats) -> Floats:
        result = super().quantised(values)
        blocks = values.reshape(len(values), -1, _VECTOR)
        result.reshape(blocks.shape)[~blocks.any(axis=-1)] = np.nan
        return result


@numeric_fault("adds-in-any-order", f"EX-03/repeat/{LONG}/float32/exact", "other bits")
class AddsInAnyOrder(ToyKernel):
    """Adds eight parts of long rows in the order in which they are ready."""

    def accumulate(self, values: Floats, dense: Floats) -> Floats:
        if values.shape[1] < _ROWS:
            return super().accumulate(values, dense)
        pieces = zip(np.array_split(values, _VECTOR, axis=1), np.array_split(dense, _VECTOR, axis=1), strict=True)
        parts = [super(AddsInAnyOrder, self).accumulate(*piece) for piece in pieces]
        total = np.zeros_like(parts[0])
        for index in np.random.default_rng().permutation(_VECTOR):
            total += parts[index]
        return total


@numeric_fault("goes-through-half", f"EX-10/large/{NF4}/bfloat16/exact", "non_finite")
class GoesThroughHalf(ToyKernel):
    """Takes bfloat16 through float16."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return super().inputs(weight, x.to(torch.float16) if x.dtype is torch.bfloat16 else x, path)


@numeric_fault("flushes-small", f"EX-10/small/{NF4}/float32/exact", "all_zero")
class FlushesSmall(ToyKernel):
    """Takes activations below 2^-24 for zero."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        values = super().inputs(weight, x, path)
        return np.where(np.abs(values) < 2.0**-24, np.float32(0), values)


class ForgetsBias(ToyKernel):
    """Adds no bias in the calls that ``when`` chooses."""

    def __init__(self, name: str, when: Callable[[Tensor, str], bool]) -> None:
        super().__init__(name)
        self._when = when

    def linear(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None, path: str) -> None:
        super().linear(prepared, x, out, bias=None if self._when(x, path) else bias, path=path)


_FORGETS: dict[tuple[str, str, str], Callable[[Tensor, str], bool]] = {
    ("int8", f"TC-09/bias/{NF4}/float32/int8", "out_of_bound"): lambda x, path: path == "dot_w4a8",
    ("half-int8", f"TC-09/bias/{NF4}/float16/int8", "out_of_bound"): lambda x, path: (
        x.dtype is torch.float16 and path == "dot_w4a8"
    ),
    ("inference", f"EX-03/inference/{NF4}/float32/exact", "inference_mode"): lambda x, path: (
        torch.is_inference_mode_enabled()
    ),
}


for (_name, _case, _says), _when in _FORGETS.items():
    _fault = numeric_fault if _name == "inference" else backend_fault
    _fault(f"forgets-bias-in-{_name}", _case, _says)(functools.partial(ForgetsBias, when=_when))


@backend_fault("silences-nan-in-int8", f"EX-10/non-finite/{NF4}/float32/int8", "finite numbers")
class SilencesNanInInt8(ToyKernel):
    """Takes what is not finite for zero where the activations are int8."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return super().inputs(weight, torch.nan_to_num(x, 0, 0, 0) if path == "dot_w4a8" else x, path)


@backend_fault("takes-int16-for-int8", f"TC-09/values/{NF4}/bfloat16/int16")
class TakesInt16ForInt8(ToyKernel):
    """Has a path for int16 activations, and rounds them to int8 there."""

    def __init__(self, name: str) -> None:
        super().__init__(name, precisions={Precision.W4A32, Precision.W4A16, Precision.W4A8, Precision.W4I16})

    def check(self, request: Request) -> Support:
        verdict = super().check(request)
        path = KernelPath("dot_w4i16", (1, None), PathKind.KERNEL, Precision.W4I16, Tier.TUNED)
        return attrs.evolve(verdict, paths=(*verdict.paths, path))

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return super().inputs(weight, x, "dot_w4a8" if path == "dot_w4i16" else path)


@backend_fault("wrong-out-dtype", f"EX-02/dtypes/{NF4}/bfloat16", "torch.bfloat16 to torch.float32")
class RoundsToInputDtype(ToyKernel):
    """Rounds to x's dtype before it rounds to the one that is asked for."""

    _dtype = torch.float32

    def product(self, weight: PackedWeight, scales: Floats, x: Tensor, path: str) -> Floats:
        self._dtype = x.dtype
        return super().product(weight, scales, x, path)

    def write(self, y: Tensor, out: Tensor) -> None:
        out.copy_(y.to(self._dtype))


@numeric_fault("silences-nan", "EX-10/non-finite", "finite numbers")
class SilencesNan(ToyKernel):
    """Turns NaN and infinity into zero."""

    def inputs(self, weight: PackedWeight, x: Tensor, path: str) -> Floats:
        return super().inputs(weight, torch.nan_to_num(x, 0.0, 0.0, 0.0), path)
