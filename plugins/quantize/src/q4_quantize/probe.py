"""The self-probe of a native quantiser: it may run only after it has written right codes on this machine.

Rounded to nearest, the bytes are the reference codec's, computed on the CPU. With stochastic rounding, equal seeds give
equal bytes and other seeds others, and each value is one of the two neighbours that its own scales allow. The kit
judges whether such rounding is fair (EX-13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_quantize import encode
from q4core import Feature, Form, NibbleOrder, PackedWeight, Rounding, WeightSpec, dequantize
from q4core.plugin_api import PLUGIN_FAULTS, note_fault, on_device

if TYPE_CHECKING:
    from q4core import Backend, Request

_ROWS, _COLUMNS = 16, 256
_SEEDS = (1, 1, 2)
_CLOSE = 2.0**-20
"""Share of a step: values this close to a level count as that level."""


def call_quantizer(backend: Backend, dense: torch.Tensor, request: Request, seed: int) -> PackedWeight:
    """Call a backend's quantiser, with its device current; to nearest by the two arguments that every one has."""
    native: Any = backend.quantize  # type: ignore[attr-defined]  # declared by op "quantize"
    options = {} if request.rounding is Rounding.NEAREST else {"rounding": request.rounding, "seed": seed}
    with torch.no_grad(), on_device(dense.device):
        packed: PackedWeight = native(dense, request, **options)
    return packed


def probe_quantizer(backend: Backend, request: Request) -> str | None:
    """Run a quantiser on a sample with zeros, ties and small values; return what is wrong first, or None.

    The sample has the request's device, dtype and classes of N and K.
    """
    is_random = request.rounding is Rounding.STOCHASTIC
    sample = _sample(request)
    asked = attrs.evolve(request, out_features=sample.shape[0], in_features=sample.shape[1])
    is_signed = request.features.isdisjoint({Feature.ZERO_POINT, Feature.FLOAT_ZERO_POINT})
    try:
        # The CPU's bytes are the reference: torch's operations may round otherwise on another device.
        wanted = encode.quantize_reference(
            sample,
            request.format,
            block_size=request.block_size,
            scale_kind=request.scale_kind,
            packing=request.packing,
            symmetric=request.format.form is Form.INTEGER and is_signed,
        )
        dense = sample.to(request.device, copy=True)
        got = [call_quantizer(backend, dense, asked, seed) for seed in (_SEEDS if is_random else (0,))]
        message = next((text for item in got if (text := _misfit(wanted, item, request.device))), None)
        if not torch.equal(dense.to("cpu"), sample):
            message = "it wrote to dense"
        if message is None:
            given = [item.to("cpu") for item in got]
            message = _misrounded(sample, given) if is_random else _difference(wanted, given[0])
    except PLUGIN_FAULTS as error:
        message = f"it raised {note_fault(backend.name, error)}"
    return None if message is None else f"the native quantiser, rounding {request.rounding.value}: {message}"


def _sample(request: Request) -> torch.Tensor:
    block = request.block_size
    round_ = max(1, _COLUMNS // block)
    columns = block * (round_ + request.in_features // block % round_) + request.in_features % block
    rows = _ROWS + request.out_features % 32
    generator = torch.Generator().manual_seed(4)
    sample = torch.randn((rows, columns), dtype=torch.float32, generator=generator)
    sample[0] = 0.0
    sample[1] = torch.randint(-24, 25, (columns,), generator=generator) / 4
    sample[2] *= 2.0**-8
    return sample.to(request.dtype)


def _misfit(wanted: PackedWeight, got: object, device: torch.device) -> str | None:
    """Return how a quantiser's result differs from the reference's layout, or None."""
    if not isinstance(got, PackedWeight):
        return f"it gave {type(got).__name__} instead of a PackedWeight"
    if WeightSpec.of(got) != WeightSpec.of(wanted):
        return f"its layout {WeightSpec.of(got)} is not the reference's {WeightSpec.of(wanted)}"
    for (field, ours), (_, theirs) in zip(wanted.tensors(), got.tensors(), strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype or theirs.device != device:
            return f"its {field} is {theirs.dtype} {list(theirs.shape)} on {theirs.device}"
    return None


def _difference(wanted: PackedWeight, got: PackedWeight) -> str | None:
    """Return in which field the bytes of two weights of one layout differ, or None."""
    for (field, ours), (_, theirs) in zip(wanted.tensors(), got.tensors(), strict=True):
        mine, its = (item.reshape(-1).view(torch.uint8) for item in (ours, theirs))
        wrong = (mine != its).nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            count = f"{len(wrong)} of {len(mine)} bytes of its {field} differ from the reference's"
            return f"{count}, first byte {first}: {int(its[first]):#04x} instead of {int(mine[first]):#04x}"
    return None


def _misrounded(sample: torch.Tensor, given: list[PackedWeight]) -> str | None:
    """Return how stochastic rounding is not what it should be, or None."""
    first, again, other = given
    if _difference(first, again) is not None:
        return "equal seeds gave other bytes"
    exact, values, levels = sample.to(torch.float64), dequantize(first, torch.float64), _levels(first)
    step = levels.diff(dim=0).amax(0) * _CLOSE
    below = torch.where(levels <= exact + step, levels, -torch.inf).amax(0)
    above = torch.where(levels >= exact - step, levels, torch.inf).amin(0)
    wrong = (values != below) & (values != above)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        value, right = float(values[row, column]), float(exact[row, column])
        near = f"{float(below[row, column]):.9g} and {float(above[row, column]):.9g}"
        count = f"{int(wrong.sum())} of {wrong.numel()}"
        return (
            f"the code at [{row}, {column}] stands for {value:.9g}, no neighbour of its value {right:.9g}, or its "
            f"scale can't reach that: the neighbours are {near}, and {count} codes are such"
        )
    return "another seed gave the same bytes" if _difference(first, other) is None else None


def _levels(weight: PackedWeight) -> torch.Tensor:
    """Return float64 [codes, N, K]: what each code would stand for in each place of a weight, rising."""
    count = 2**weight.format.bits
    width = 1 if weight.packing.order is NibbleOrder.BYTES else count + 1
    one = [attrs.evolve(weight, qdata=torch.full_like(weight.qdata, code * width)) for code in range(count)]
    return torch.stack([dequantize(item, torch.float64) for item in one]).sort(dim=0).values
