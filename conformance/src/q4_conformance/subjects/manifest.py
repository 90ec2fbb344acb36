"""Answers of a manifest alone: the formats that a subject declares, and the cases about what it does not."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.subjects.backend import BackendSubject, not_declared
from q4_conformance.subjects.dialect import DialectSubject
from q4_conformance.subjects.files import FileSubject
from q4_conformance.subjects.layer_type import LayerSubject
from q4core import BUILTIN_FORMATS, EVERY_FORMAT, Feature, Precision, Request, Rounding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from q4_conformance.contract.case import Case
    from q4_conformance.oracle.weights import WeightRecipe
    from q4core import Capabilities, PackedWeight

_QUANTISERS = {"native_quantiser", "quantise_calls", "ste_native", "stochastic"}
_GRADIENTS = {"gradient", "train_through"}
_SPIKES = {"spikes_numbers", "spikes_pages", "spikes_quiet"}


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
    """Return why the manifest alone says that a case is not due; nothing where it is due, or where that is unknown."""
    try:
        if isinstance(subject, LayerSubject):
            return subject.lacks
        if isinstance(subject, FileSubject):
            return subject.missing(case.check)
        if isinstance(subject, DialectSubject):
            return f"format {case.format}" if case.format and case.format not in subject.dialect.formats else ""
        if isinstance(subject, BackendSubject) and case.recipe is not None:
            return next(_missing(case, subject.backend.capabilities, subject.device), "")
    except Exception:  # noqa: BLE001  # a stranger's manifest: the cases will judge it
        return ""
    return ""


def _missing(case: Case, manifest: Capabilities, device: torch.device) -> Iterator[str]:
    """Yield what a case needs and a manifest does not declare, the plainest first."""
    if case.check in _QUANTISERS and "quantize" not in manifest.ops:
        yield "op 'quantize'"
    if case.check in _SPIKES and "spikes" not in manifest.ops:
        yield "op 'spikes'"
    if case.check == "stochastic" and Rounding.STOCHASTIC not in manifest.roundings:
        yield "stochastic rounding"
    if case.check == "native_product" and Precision.W4A4 not in manifest.precisions:
        yield "activation precision 'fp4'"
    if case.check in _GRADIENTS and Feature.GRADIENTS not in manifest.features:
        yield "feature 'gradients'"
    place = torch.device("cuda") if case.check == "cuda_only" else device
    if case.check == "cuda_only":
        manifest = attrs.evolve(manifest, devices={"cuda"})
    yield from (text.removesuffix(" is not declared") for text in not_declared(manifest, request_of(case, place)))


def request_of(case: Case, device: torch.device) -> Request:
    """Return the request that a layer of a case makes, over a weight of as few rows as show what it needs."""
    recipe = case.weight_recipe
    small = recipe if recipe.is_flat else attrs.evolve(recipe, n=1)
    return Request.for_weight(_weight(small), device=device, dtype=case.dtype, precision=case.precision)


@functools.lru_cache(maxsize=256)
def _weight(recipe: WeightRecipe) -> PackedWeight:
    return recipe.build()


def with_cases(declared: Iterable[str]) -> tuple[str, ...]:
    """Return the formats that the kit has cases of, among those declared."""
    known = {*declared}
    return tuple(item for item in BUILTIN_FORMATS if known & {EVERY_FORMAT, item})


def declared_in(manifest: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the formats that a manifest declares, of a backend or of a dialect; None where it names none."""
    formats = manifest.get("formats") or manifest.get("capabilities", {}).get("formats")
    return None if formats is None else tuple(sorted({item for item in formats if isinstance(item, str)}))
