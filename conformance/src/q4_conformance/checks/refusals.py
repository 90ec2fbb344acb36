"""Check of refusals: what does not fit a layer is refused before any kernel runs, with what would fit."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.contract.case import check, expect
from q4_conformance.outcome import FailureError
from q4core import InputError, Q4Error, ScaleKind, WeightError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4core import PackedWeight

_NAME = "model.layers.7.mlp.up_proj"


def _damaged(weight: PackedWeight) -> Iterator[tuple[str, PackedWeight]]:
    """Yield weights whose numbers no checkpoint may hold."""
    nan_bytes = {ScaleKind.E8M0: 255, ScaleKind.E4M3: 0x7F, ScaleKind.E4M3_MUL: 0x7F, ScaleKind.E4M3_DIV: 0x7F}
    if weight.scale_kind in nan_bytes:
        stored = weight.scale.clone().view(torch.uint8)
        stored.view(-1)[-1] = nan_bytes[weight.scale_kind]
        yield "a NaN scale", attrs.evolve(weight, scale=stored.view(weight.scale.dtype))
    for field in ("scale", "global_scale", "nested_scale", "offset", "zero", "input_channel_scale"):
        tensor = getattr(weight, field)
        if tensor is None or tensor.dtype not in {torch.float32, torch.float16, torch.bfloat16}:
            continue
        for value in (float("nan"), float("inf")):
            spoilt = tensor.clone()
            spoilt.view(-1)[-1] = value
            yield f"{value} in {field}", attrs.evolve(weight, **{field: spoilt})


_Bad = tuple[str, "torch.Tensor | list[list[float]]", dict[str, torch.Tensor], str]
"""What is wrong, x, further arguments, and the legal choice that the error must tell."""


def _bad_inputs(case: Case, weight: PackedWeight, device: torch.device) -> Iterator[_Bad]:
    inputs, outputs, dtype = weight.in_features, weight.out_features, case.dtype
    good = torch.zeros(3, inputs, dtype=dtype, device=device)
    wide = good.new_zeros(3, max(inputs, outputs))
    yield "one in-feature too many", good.new_zeros(3, inputs + 1), {}, str(inputs)
    yield "one in-feature too few", good.new_zeros(3, inputs - 1), {}, str(inputs)
    yield "no in-features", good.new_zeros(3, 0), {}, str(inputs)
    yield "rank 0", good.new_zeros(()), {}, str(inputs)
    for other in {torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8} - {dtype}:
        yield f"dtype {other}", good.to(other), {}, str(dtype)
    yield "another device", torch.zeros(3, inputs, dtype=dtype, device="meta"), {}, str(device)
    yield "no tensor", [[0.0] * inputs], {}, "tensor"
    yield "out= of another shape", good, {"out": good.new_zeros(3, outputs + 1)}, f"[3, {outputs}]"
    yield "out= of another dtype", good, {"out": torch.zeros(3, outputs, device=device).to(torch.float64)}, str(dtype)
    yield "out= over x", wide[:, :inputs], {"out": wide[:, :outputs]}, "memory"


@check("refusals")
def check_refusals(case: Case, subject: BackendSubject) -> str:
    """What does not fit is refused at once, before any kernel, by a typed error that names layer and legal choice."""
    weight = attrs.evolve(case.weight(), name=_NAME)
    layer = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    count = 0

    def refuse(what: str, call: Callable[[], object], kind: type[Q4Error], legal: str, name: str = _NAME) -> None:
        nonlocal count
        count += 1
        try:
            call()
        except kind as error:
            expect(name in str(error), f"{what}: the error does not name the layer: {error}")
            expect(error.rule, f"{what}: the error does not say the rule: {error}")
            expect(legal in str(error), f"{what}: the error does not tell the legal choice {legal!r}: {error}")
            expect(error.hint, f"{what}: the error does not say what to do: {error}")
        except Exception as error:
            raise FailureError(f"{what}: {type(error).__name__} instead of a typed error: {error}") from error
        else:
            raise FailureError(f"{what} was accepted")

    before = sum(layer.diagnostics().calls)
    for what, x, arguments, legal in _bad_inputs(case, weight, layer.device):
        refuse(what, functools.partial(layer.module, x, **arguments), InputError, legal)
    expect(sum(layer.diagnostics().calls) == before, "a refused call ran")
    make, outputs = layer.session.linear, weight.out_features
    for what, bias in (
        ("a bias that is too long", torch.zeros(outputs + 1)),
        ("a bias of integers", torch.zeros(outputs, dtype=torch.int64)),
        ("a bias of rank 2", torch.zeros(1, outputs)),
    ):
        refuse(what, functools.partial(make, weight, bias), InputError, f"[{outputs}]")
    dense: Any = torch.zeros(weight.shape)
    refuse("a dense weight", functools.partial(make, dense), InputError, "PackedWeight", name="session.linear")
    for what, spoilt in _damaged(weight):
        refuse(what, functools.partial(make, spoilt), WeightError, "finite")
    return f"{count} refusals"
