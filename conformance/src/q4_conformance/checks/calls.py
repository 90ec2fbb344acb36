"""Checks of how a layer may be called: shapes, layouts, ``out=``, again, from threads; and what it may write.

Some shapes are random: sizes drawn from a fixed seed, and parts cut from larger weights.
"""

from __future__ import annotations

import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance.checks.values import (
    check_awkward,
    draw,
    draws,
    expect_same_bits,
    judge_call,
    judged_calls,
    make_bias,
    rows_of,
)
from q4_conformance.contract.case import check, expect, within
from q4_conformance.measurement.guard_pages import on_last_page
from q4_conformance.oracle.exact import as_given, judge_by
from q4_conformance.outcome import NotDeclaredError, NotTestableError
from q4_conformance.subjects.backend import BackendLayer
from q4core import Feature, Form, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.function import Layer, Subject
    from q4core import PackedWeight

_GUARD = 64
_CANARY = 97.0


@check("leading")
def _check_leading(case: Case, subject: Subject) -> str:
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    outputs, inputs = layer.weight.shape
    further = [((rows + 1) // 2, 1, 2) for rows in rows_of(case, layer)[len(case.rows) :]]
    shapes = [(), (1,), (2, 3), (1, 2, 1, 3), (0,), (2, 0), *further]
    for leading in shapes:
        rows = int(np.prod(leading, dtype=int))
        flat = draw(case, layer, rows)
        y = layer(flat.reshape(*leading, inputs))
        expect(tuple(y.shape) == (*leading, outputs), f"x {[*leading, inputs]} gave {list(y.shape)}")
        judge_call(layer, flat, y.reshape(rows, outputs))
    return f"{len(shapes)} shapes"


@check("strided")
def _check_strided(case: Case, subject: Subject) -> str:
    """Inputs that are not contiguous, or start at an odd place, are refused by a typed error or computed right.

    NaN surrounds every input, so that a read past its end shows even where it is multiplied by zero.
    """
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    inputs = layer.weight.in_features
    seen = []
    for x in draws(case, layer):
        rows = x.shape[0]
        wide = torch.full((rows, inputs + 3), torch.nan, dtype=x.dtype, device=x.device)
        wide[:, 1 : inputs + 1] = x
        gaps = torch.full((rows, inputs, 2), torch.nan, dtype=x.dtype, device=x.device)
        gaps[..., 0] = x
        views = {
            "a slice of wider rows": wide[:, 1 : inputs + 1],
            "a transposed copy": x.T.contiguous().T,
            "every second element": gaps[..., 0],
            "every second row": torch.stack((x, torch.full_like(x, torch.nan)), dim=1)[:, 0],
            "one row, expanded": x[:1].expand(rows, inputs),
        }
        for name, view in views.items():
            try:
                y = layer(view)
            except InputError:
                seen.append(f"{name} refused")
                continue
            judge_call(layer, view, y)
    return f"{len(views)} layouts" + (f"; {', '.join(seen)}" if seen else "")


@check("out")
def _check_out(case: Case, subject: Subject) -> str:
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    if not subject.has_out:
        raise NotDeclaredError("out= is not declared")
    for x in draws(case, layer):
        shape = (x.shape[0], layer.weight.out_features)
        plain = torch.full(shape, torch.nan, dtype=case.dtype, device=layer.device)
        sideways = torch.full(shape[::-1], torch.nan, dtype=case.dtype, device=layer.device).T
        odd = torch.full((plain.numel() + 1,), torch.nan, dtype=case.dtype, device=layer.device)[1:].view(shape)
        for out in (plain, sideways, odd):
            y = layer(x, out=out)
            expect(y is out, "the result is not the tensor given as out=")
            judge_call(layer, x, out)
    return "contiguous, transposed and at an odd place"


@check("repeat")
def _check_repeat(case: Case, subject: Subject) -> str:
    weight = case.weight()
    first = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    calls = judged_calls(first, draws(case, first))
    second = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    for layer, whose in ((first, "the same layer"), (second, "a second layer"), (first, "the first layer, afterwards")):
        expect_same_bits(layer, calls, whose)
    return f"{3 * len(calls)} repetitions"


_THREADS, _LAYERS = 4, 3


def _further_layers(case: Case, subject: Subject, first: Layer) -> list[Layer]:
    """Return layers over other weights of the same form: in the first one's session, where it has one."""
    seeds = range(case.weight_recipe.seed + 1, case.weight_recipe.seed + _LAYERS)
    weights = [attrs.evolve(case.weight_recipe, seed=seed).build() for seed in seeds]
    if isinstance(first, BackendLayer):
        return [attrs.evolve(first, module=first.session.linear(weight), weight=weight) for weight in weights]
    return [subject.layer(weight, dtype=case.dtype, precision=case.precision) for weight in weights]


@check("threads")
def _check_threads(case: Case, subject: Subject) -> str:
    weight = case.weight()
    first = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    layers = [first, *_further_layers(case, subject, first)]
    inputs = [draw(case, first, rows, seed) for rows in rows_of(case, first) for seed in case.seeds]
    expected = [[layer(x).clone() for x in inputs] for layer in layers]
    start = threading.Barrier(_THREADS)

    def run(shift: int) -> list[str]:
        start.wait()
        own = attrs.evolve(first, module=first.session.linear(weight)) if isinstance(first, BackendLayer) else first
        names = [f"layer {index}" for index in range(_LAYERS)]
        mine = [(own, expected[0], "a layer made there"), *zip(layers, expected, names, strict=True)]
        problems = []
        for turn in range(shift, shift + 3 * len(inputs)):
            layer, wanted, name = mine[turn % len(mine)]
            index = turn % len(inputs)
            if not torch.equal(layer(inputs[index]), wanted[index]):
                problems.append(f"M = {inputs[index].shape[0]}: other bits from {name}")
        return problems

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        problems = {problem for found in pool.map(run, range(_THREADS)) for problem in found}
    expect(not problems, "; ".join(sorted(problems)))
    return f"{_THREADS} threads, {_LAYERS} layers and one of each thread, {3 * _THREADS * len(inputs)} calls"


@check("unmodified")
def _check_unmodified(case: Case, subject: Subject) -> str:
    areas: dict[str, torch.Tensor] = {}

    def guarded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        areas[name], middle = _guarded(tensor)
        return middle

    weight, bias = _rebuilt(case.weight(), guarded), guarded("bias", make_bias(case))
    before = {name: area.clone() for name, area in areas.items()}
    layer = subject.layer(weight, bias, dtype=case.dtype, precision=case.precision)
    for source in draws(case, layer):
        rows = source.shape[0]
        around, x = _guarded(source, torch.nan)
        given = around.clone().view(torch.uint8)
        y = layer(x)
        what = f"M = {rows}: the input, or what surrounds it, was written"
        expect(torch.equal(around.view(torch.uint8), given), what)
        _expect_unchanged(areas, before)
        judge_call(layer, source, y)
        if subject.has_out:
            area, out = _guarded(torch.zeros_like(y))
            layer(x, out=out)
            judge_call(layer, source, out)
            edges = torch.cat((area[:_GUARD], area[-_GUARD:]))
            expect(bool((edges == _CANARY).all()), f"M = {rows}: something was written next to out=")
    # The core looks closely at the first weight of a kind only; later ones must be left alone, too.
    subject.layer(weight, bias, dtype=case.dtype, precision=case.precision)(source)
    _expect_unchanged(areas, before)
    return "x, bias, weight and the bytes around them"


@check("last_page")
def _check_last_page(case: Case, subject: Subject) -> str:
    """Input, bias and every tensor of the weight end where readable memory ends: a read past an end kills the process.

    Where the subject's own copy lies is the subject's; what it is given is looked at here.
    """
    if subject.device.type != "cpu":
        raise NotTestableError("only the CPU's memory can be made unreadable page by page")
    weight = _rebuilt(case.weight(), lambda _, tensor: on_last_page(tensor))
    layer = subject.layer(weight, on_last_page(make_bias(case)), dtype=case.dtype, precision=case.precision)
    for x in draws(case, layer):
        if subject.has_out:
            out = on_last_page(torch.empty(x.shape[0], weight.out_features, dtype=case.dtype))
            judge_call(layer, x, layer(on_last_page(x), out=out))
        judge_call(layer, x, layer(on_last_page(x)))
    return f"{len(list(weight.tensors()))} tensors of the weight, x, bias and out="


def _rebuilt(weight: PackedWeight, place: Callable[[str, torch.Tensor], torch.Tensor]) -> PackedWeight:
    """Return a weight of copies of the tensors, which is judged by the same twin."""
    fields: dict[str, Any] = {name: place(name, tensor) for name, tensor in weight.tensors()}
    rebuilt = attrs.evolve(weight, **fields)
    judge_by(rebuilt, as_given(weight))
    return rebuilt


def _expect_unchanged(areas: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    for name, area in areas.items():
        now, was = (item.view(torch.uint8) for item in (area, before[name]))
        edge = _GUARD * area.element_size()
        own = "the bias was written" if name == "bias" else f"the caller's weight was written: {name}"
        expect(torch.equal(now[edge:-edge], was[edge:-edge]), own)
        expect(torch.equal(now, was), f"something was written next to {name}")


def _guarded(tensor: torch.Tensor, canary: float = _CANARY) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a flat area with a canary at both ends, and the tensor's copy in its middle."""
    area = torch.full((tensor.numel() + 2 * _GUARD,), canary, dtype=tensor.dtype, device=tensor.device)
    middle = area[_GUARD : _GUARD + tensor.numel()].view(tensor.shape)
    middle.copy_(tensor)
    return area, middle


_SHAPES = 12


def _shapes(case: Case) -> Iterator[Case]:
    """Yield the case on weights up to the size of its own, with one number of rows up to its largest."""
    recipe, kind = case.weight_recipe, case.weight_recipe.format
    random = np.random.default_rng([case.seeds[0], *kind.name.encode()])
    for _ in range(_SHAPES):
        rows, n, k = (int(random.integers(1, most + 1)) for most in (max(case.rows), recipe.n, recipe.k))
        is_flat = kind.has_flat_blocks and bool(random.integers(2))
        if is_flat:
            shaped = attrs.evolve(recipe, n=n, k=k, features={Feature.FLAT_BLOCKS})
        elif kind.form is Form.INTEGER:  # whose last block may be short
            shaped = attrs.evolve(recipe, n=n, k=k)
        else:
            shaped = attrs.evolve(recipe, n=n, k=-(-k // recipe.block_size) * recipe.block_size)
        yield attrs.evolve(case, recipe=shaped, rows=(rows,), seeds=case.seeds[:1])


@check("shapes")
def _check_shapes(case: Case, subject: Subject) -> str:
    outcomes, missing = [], ""
    for index, shaped in enumerate(_shapes(case)):
        recipe = shaped.weight_recipe
        what = f"seed {case.seeds[0]}, shape {index}: M = {shaped.rows[0]}, N = {recipe.n}, K = {recipe.k}"
        try:
            with within(f"{what}{', flat' if recipe.is_flat else ''}"):
                outcomes.append(check_awkward(shaped, subject))
        except NotDeclaredError as error:
            missing = str(error)
    if not outcomes:
        raise NotDeclaredError(missing)
    refused = sum(outcome.startswith("refused") for outcome in outcomes)
    return f"seed {case.seeds[0]}: {len(outcomes) - refused} shapes right, {refused} refused"


@check("cut")
def _check_cut(case: Case, subject: Subject) -> str:
    recipe = case.weight_recipe
    whole = attrs.evolve(case, recipe=attrs.evolve(recipe, k=2 * recipe.k)).weight()
    weight = whole.narrow(1, recipe.k, recipe.k)
    judge_by(weight, as_given(whole).narrow(1, recipe.k, recipe.k))
    layer = subject.layer(weight, make_bias(case), dtype=case.dtype, precision=case.precision)
    judged_calls(layer, draws(case, layer))
    strided = [name for name, tensor in weight.tensors() if not tensor.is_contiguous()]
    return f"with gaps between rows: {', '.join(strided)}"
