"""What a manifest alone answers: which cases are about something that a subject does not declare."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.subjects.backend import WISHES, BackendSubject
from q4_conformance.subjects.dialect import DialectSubject
from q4core import Feature, Precision, Request, Rounding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from q4_conformance.contract.case import Case
    from q4_conformance.oracle.weights import WeightRecipe
    from q4core import Capabilities, PackedWeight

_QUANTISERS = {"native_quantiser", "quantise_calls", "ste_native", "stochastic"}
_GRADIENTS = {"gradient", "train_through"}


def split(cases: Iterable[Case], subject: Any) -> tuple[tuple[Case, ...], dict[str, str]]:
    """Return the cases to run, and id → reason of those about what the subject does not declare."""
    due, undeclared = [], {}
    for case in cases:
        reason = undeclared_reason(case, subject)
        if reason:
            undeclared[case.id] = reason
        else:
            due.append(case)
    return tuple(due), undeclared


def undeclared_reason(case: Case, subject: Any) -> str:
    """Return why the manifest alone says that a case is not due; nothing where it is due, or where nobody can say."""
    try:
        if isinstance(subject, DialectSubject):
            return f"format {case.format}" if case.format and case.format not in subject.dialect.formats else ""
        if isinstance(subject, BackendSubject) and case.recipe is not None:
            return next(_missing(case, subject.backend.capabilities, subject.device), "")
    except Exception:  # noqa: BLE001  # a stranger's manifest: the cases will judge it
        return ""
    return ""


def _missing(case: Case, manifest: Capabilities, device: torch.device) -> Iterator[str]:
    if case.check in _QUANTISERS and "quantize" not in manifest.ops:
        yield "op 'quantize'"
        return
    if case.check == "stochastic" and Rounding.STOCHASTIC not in manifest.roundings:
        yield "stochastic rounding"
        return
    if case.check == "native_product" and Precision.W4A4 not in manifest.precisions:
        yield "activation precision 'fp4'"
        return
    if case.check in _GRADIENTS and Feature.GRADIENTS not in manifest.features:
        yield "feature 'gradients'"
        return
    place = torch.device("cuda") if case.check == "cuda_only" else device
    if case.check == "cuda_only":
        manifest = attrs.evolve(manifest, devices={"cuda"})
    refusals = manifest.refusals(request_of(case, place))
    yield from (reason.message.removesuffix(" is not declared") for reason in refusals)
    wanted = WISHES.get(case.precision)
    if not refusals and wanted is not None and not wanted & manifest.precisions:
        yield f"activation precision {case.precision.value!r}"


def request_of(case: Case, device: torch.device) -> Request:
    """Return the request that a layer of a case makes, over a weight of as few rows as show what it needs."""
    recipe = case.weight_recipe
    small = recipe if recipe.is_flat else attrs.evolve(recipe, n=1)
    return Request.for_weight(_weight(small), device=device, dtype=case.dtype, precision=case.precision)


@functools.lru_cache(maxsize=256)
def _weight(recipe: WeightRecipe) -> PackedWeight:
    return recipe.build()
