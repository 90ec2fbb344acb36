"""Checks of a backend's sparse product: its numbers, and its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.checks.endurance import threads
from q4_conformance.contract.case import check, expect, within
from q4_conformance.measurement.allocations import watch
from q4_conformance.measurement.guard_pages import on_last_page
from q4_conformance.oracle.compare import judge
from q4_conformance.oracle.exact import exact_linear
from q4_conformance.outcome import NotDeclaredError, NotTestableError
from q4_conformance.subjects.reference import require_device
from q4core import Prepared
from q4core.extension import LayerHandle

if TYPE_CHECKING:
    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4core import PackedWeight

_COUNTS = (1, 2, 3)


def _require_spikes(subject: BackendSubject) -> None:
    if "spikes" not in subject.backend.capabilities.ops:
        raise NotDeclaredError("op 'spikes' is not declared")
    require_device(subject.device)


def _spikes(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return rows of 0 and 1, by turns few, none, some, all, and the two ends alone."""
    random = torch.rand((rows, columns), generator=torch.Generator().manual_seed(seed))
    x = (random < torch.tensor([0.03, 0.0, 0.3, 1.0, 0.0]).repeat(rows)[:rows, None]).to(torch.float32)
    x[4::5, 0] = x[4::5, -1] = 1
    return x


def _bias(weight: PackedWeight) -> torch.Tensor:
    return torch.randn(weight.out_features, generator=torch.Generator().manual_seed(22))


def _prepared(case: Case, subject: BackendSubject) -> tuple[PackedWeight, Prepared]:
    weight = case.weight()
    request = subject.request(weight, dtype=torch.float32)
    subject.require_declared(request)
    return weight, subject.prepare(weight, request)


@check("spikes_numbers")
def check_spikes_numbers(case: Case, subject: BackendSubject) -> str:
    """Every row has the numbers of float64, and the same bits among other rows and on any number of threads."""
    _require_spikes(subject)
    worst = 0.0
    for seed, rows in zip(case.seeds, case.rows, strict=False):
        weight = case.weight()
        bias = _bias(weight).to(subject.device)
        layer = subject.layer(weight, bias, dtype=torch.float32).module
        x = _spikes(rows, weight.in_features, seed)
        given, found = (x != 0).to(subject.device), list[torch.Tensor]()
        for count in _COUNTS:
            with threads(count), within(f"{rows} rows, {count} threads"):
                y = torch.full((rows, weight.out_features), torch.nan, device=subject.device)
                _call(subject, layer, given, y, bias)
                compared = judge(y, exact_linear(weight, x, bias), out_dtype=torch.float32, device=subject.device)
                expect(compared.passed, compared.message)
                worst, found = max(worst, compared.ratio or 0.0), [*found, y]
        expect(all(torch.equal(found[0], y) for y in found), f"{rows} rows: other bits on other threads")
        for row in range(rows):
            y = torch.empty((1, weight.out_features), device=subject.device)
            _call(subject, layer, given[row : row + 1], y, bias)
            expect(torch.equal(y[0], found[0][row]), f"row {row} of {rows} has other bits alone")
    return f"worst error {worst:.3g} of its bound"


def _call(subject: BackendSubject, layer: Any, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor) -> None:
    backend: Any = subject.backend
    backend.spikes(LayerHandle(layer).prepared, x, out, bias=bias)


@check("spikes_pages")
def check_spikes_pages(case: Case, subject: BackendSubject) -> str:
    """All that is given ends where readable memory ends: a read or a write past an end kills the process."""
    _require_spikes(subject)
    if subject.device.type != "cpu":
        raise NotTestableError("only the CPU's memory can be made unreadable page by page")
    weight, prepared = _prepared(case, subject)
    placed = Prepared([on_last_page(tensor) for tensor in prepared.tensors], prepared.meta)
    backend: Any = subject.backend
    for rows in case.rows:
        x = on_last_page(_spikes(rows, weight.in_features, rows) != 0)
        out = on_last_page(torch.full((rows, weight.out_features), torch.nan))
        backend.spikes(placed, x, out, bias=on_last_page(_bias(weight)))
        expect(bool(out.isfinite().all()), f"{rows} rows: an element was not written")
    return f"{len(case.rows)} numbers of rows"


@check("spikes_quiet")
@threads(1)
def check_spikes_quiet(case: Case, subject: BackendSubject) -> str:
    """A call makes no tensor."""
    _require_spikes(subject)
    weight, prepared = _prepared(case, subject)
    backend: Any = subject.backend
    x = (_spikes(5, weight.in_features, 5) != 0).to(subject.device)
    out = torch.empty((5, weight.out_features), device=subject.device)
    bias = _bias(weight).to(subject.device)
    backend.spikes(prepared, x, out, bias=bias)
    elements = watch(lambda: backend.spikes(prepared, x, out, bias=bias), subject.device).elements
    expect(elements == 0, f"a call made tensors of {elements} elements")
    return f"{int(x.sum())} spikes"
