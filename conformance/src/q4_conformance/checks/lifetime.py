"""Checks of a layer's life: prepared again, copied, moved, sent to another process, and released."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING

import attrs
import torch

from q4_conformance.checks.endurance import Growth
from q4_conformance.checks.layer import expect_same_weight
from q4_conformance.checks.values import draw, expect_same_bits, judge_call, judged_calls, make_bias
from q4_conformance.contract.case import check, expect, raised
from q4_conformance.oracle.exact import as_given
from q4_conformance.subjects.remote_call import call_elsewhere
from q4_conformance.subjects.temporary_plugin import lent
from q4core import ActivationPrecision, BackendUnavailableError, LifecycleError

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendLayer, BackendSubject
    from q4core import PackedWeight, Q4Linear

LOST_LAYERS = 1 / 4
"""The share of what was prepared that may leak per layer."""
_LIVES = 12
_WARM_LIVES = 3
_STRETCH = 4
"""Layers between two looks at memory; the twelve are three stretches."""


@check("prepare_again")
def _check_prepare_again(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    request = subject.request(weight, dtype=case.dtype, precision=ActivationPrecision.EXACT)
    layer = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    first = subject.prepare(weight, request)
    results = {}
    for segment in layer.diagnostics().segments:
        x = draw(case, layer, segment.low)
        out = torch.empty(segment.low, weight.out_features, dtype=case.dtype, device=subject.device)
        subject.backend.linear(first, x, out, bias=None, path=segment.path.name)
        judge_call(layer, x, out)
        results[segment] = (x, out)
    second = subject.prepare(weight, request)
    forms = [[(tensor.dtype, tensor.shape) for tensor in item.tensors] for item in (first, second)]
    expect(forms[0] == forms[1], f"prepared again, the tensors are {forms[1]}, were {forms[0]}")
    same = first.meta == second.meta and repr(first.meta) == repr(second.meta)
    expect(same, f"prepared again, meta is {second.meta!r}, was {first.meta!r}")
    other = attrs.evolve(case.weight_recipe, seed=977).build()
    again = subject.prepare(other, subject.request(other, dtype=case.dtype, precision=ActivationPrecision.EXACT))
    expect(again.meta == first.meta, f"another weight of the same form has the meta {again.meta!r}, not {first.meta!r}")
    for which, prepared in (("second", second), ("first", first)):
        for segment, (x, y) in results.items():
            out = torch.full_like(y, torch.nan)
            subject.backend.linear(prepared, x, out, bias=None, path=segment.path.name)
            expect(torch.equal(out, y), f"{segment.path.name}: other bits from what was prepared {which}")
    return f"{len(results)} paths, prepared twice"


@check("dispose")
def _check_dispose(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    size, growth = 0, Growth(subject.device)
    for life in range(_WARM_LIVES + _LIVES):
        if life >= _WARM_LIVES and (life - _WARM_LIVES) % _STRETCH == 0:
            growth.look()
        layer = subject.layer(weight, dtype=case.dtype, precision=case.precision)
        x = torch.zeros(1, weight.in_features, dtype=case.dtype, device=layer.device)
        layer.module(x)
        size = max(size, layer.diagnostics().prepared_bytes)
        if life % 2:
            layer.session.close()  # the others go with their last reference
            _expect_closed(layer, weight, x)
        del layer
    growth.look()
    grown = growth.bytes
    limit = _LIVES * size * LOST_LAYERS
    expect(grown < limit, f"{grown} bytes stayed after {_LIVES} layers of {size} bytes each, {limit:.0f} at most")
    return f"{_LIVES} layers of {size} bytes each, {grown} bytes stayed"


def _expect_closed(layer: BackendLayer, weight: PackedWeight, x: torch.Tensor) -> None:
    left = [name for name, _ in layer.module.named_buffers()]
    expect(not left, f"a closed layer still has the buffers {left}")
    for what, call in (
        ("a call", lambda: layer.module(x)),
        ("the layer's weight", layer.module.packed_weight),
        ("the layer's state", layer.module.state_dict),
        ("a new layer", lambda: layer.session.linear(weight)),
    ):
        raised(LifecycleError, call, f"{what} was served after the end")
    layer.session.close()
    layer.module.close()


def _expect_twin(
    what: str, module: Q4Linear, weight: PackedWeight, calls: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    expect_same_weight(module.packed_weight(), as_given(weight), f"the {what} layer's weight differs")
    expect_same_bits(module, calls, f"the {what} layer")


@check("copies")
def _check_copies(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    bias = make_bias(case)
    with lent(subject.backend):
        layer = subject.layer(weight, bias, dtype=case.dtype, precision=case.precision)
        calls = judged_calls(layer, [draw(case, layer, rows) for rows in case.rows])
        deep = copy.deepcopy(layer.module)
        _expect_twin("deeply copied", deep, weight, calls)
        _expect_twin("copied", copy.copy(layer.module), weight, calls)
        _expect_twin("moved", deep.to(subject.device), weight, calls)
        seen = [
            _cast(case, subject, weight, bias, deep, dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float32)
            if dtype != case.dtype
        ]
        _expect_twin("first", layer.module, weight, calls)
        layer.session.close()
        _expect_twin("deeply copied, once the first was closed", copy.deepcopy(deep.to(case.dtype)), weight, calls)
    return f"copied, deeply copied, moved; {', '.join(seen)}"


def _cast(  # noqa: PLR0913  # the facts of one cast
    case: Case, subject: BackendSubject, weight: PackedWeight, bias: torch.Tensor, module: Q4Linear, dtype: torch.dtype
) -> str:
    """Take a layer to another dtype and back: codes and scales keep their bytes, and results are right."""
    twin = copy.deepcopy(module)
    try:
        twin.to(dtype)
    except BackendUnavailableError as error:
        expect(dtype not in subject.backend.capabilities.dtypes, f".to({dtype}) was refused: {error}")
        return f"{dtype} refused"
    expect_same_weight(twin.packed_weight(), as_given(weight), f".to({dtype}) changed the weight")
    plain = subject.layer(weight, bias.to(dtype), dtype=dtype, precision=case.precision)
    generator = torch.Generator().manual_seed(case.seeds[0])
    x = torch.randn(3, weight.in_features, generator=generator).to(subject.device, dtype)
    expect(torch.equal(twin(x), plain(x)), f".to({dtype}) gives other bits than a layer made so")
    return f"{dtype} right"


@check("elsewhere")
def _check_elsewhere(case: Case, subject: BackendSubject) -> str:
    weight = case.weight()
    with lent(subject.backend):
        layer = subject.layer(weight, make_bias(case), dtype=case.dtype, precision=case.precision)
        ((x, y),) = judged_calls(layer, [draw(case, layer, max(case.rows))])
    gc.collect()
    got, there = call_elsewhere(subject.backend, layer.module, x)
    expect_same_weight(got, as_given(weight), "in the other process the weight differs")
    expect(torch.equal(there, y.cpu()), "other bits from the other process")
    return "the same weight and bits in a new process"
