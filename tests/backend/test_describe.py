"""``describe`` and ``meta_from``: a prepared layout as JSON, for another process."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import q4core as q4
from q4_cpu_native import CpuNative
from tests.support.samples import FORMAT_KINDS, random_weight

BACKENDS = ("cpu-native", "dequant-fallback")
DAMAGE: dict[str, Any] = {
    "nothing": {},
    "another version": {"version": 99, "layout": 99},
    "no such format": {"format": "nf5", "spec": {"format": "nf5"}},
    "a list": {"fields": ["qdata"], "scale_dtype": ["float32"]},
    "no dtype": {"dtype": "float33", "scale_dtype": None},
}


def _prepared(name: str, weight: q4.PackedWeight) -> tuple[Any, q4.Prepared]:
    backend: Any = q4.default_registry().backends()[name]
    request = q4.Request.for_weight(weight)
    return backend, backend.prepare(weight, request, q4.PrepareContext("cpu"))


@pytest.mark.parametrize(
    ("name", "format_", "kind"),
    [
        (name, format_, kind)
        for name in BACKENDS
        for format_, kind in FORMAT_KINDS
        if name != "cpu-native" or format_ in CpuNative.capabilities.formats
    ],
)
def test_a_described_layout_comes_back_equal(name: str, format_: str, kind: q4.ScaleKind) -> None:
    """What JSON holds of a layout gives an equal one back, whose ``repr``, and so its plan's name, is the same."""
    weight = random_weight(format_, 24, 128, kind)
    backend, prepared = _prepared(name, weight)
    meta = backend.meta_from(json.loads(json.dumps(backend.describe(prepared.meta))))
    assert meta == prepared.meta
    assert repr(meta) == repr(prepared.meta)
    back = backend.export(q4.Prepared(prepared.tensors, meta))
    assert torch.equal(q4.dequantize(back), q4.dequantize(backend.export(prepared)))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_facts_that_are_not_of_a_layout_are_a_typed_error(name: str, damage: str) -> None:
    """What was not described by this version is refused, not guessed at."""
    backend, prepared = _prepared(name, random_weight("q4_1", 24, 128))
    facts = backend.describe(prepared.meta)
    changed = {key: value for key, value in DAMAGE[damage].items() if key in facts}
    if "spec" in changed:
        changed["spec"] = facts["spec"] | changed["spec"]
    with pytest.raises(q4.Q4Error):
        backend.meta_from(facts | changed if damage != "nothing" else {})
