"""``WeightSpec``: exact as JSON, hashable, and refusing what it did not write."""

from __future__ import annotations

import json

import pytest
import torch

import q4core as q4
from tests.support.samples import FORMAT_KINDS, random_weight


@pytest.mark.parametrize(("format_", "kind"), FORMAT_KINDS)
def test_round_trip_through_json(format_: str, kind: q4.ScaleKind) -> None:
    """Every format's spec comes back equal, and builds the same weight."""
    weight = random_weight(format_, 8, 128, kind, name="w")
    spec = q4.WeightSpec.of(weight)
    again = q4.WeightSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)
    built = again.build([tensor for _, tensor in weight.tensors()])
    assert torch.equal(q4.dequantize(built), q4.dequantize(weight))


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("version", 2),
        ("format", "nf5"),
        ("scale_kind", "thermometer"),
        ("packing", "sideways"),
        ("fields", ["qdata", "__class__"]),
        ("fields", 3),
        ("fields", ["qdata"]),
        ("fields", ["qdata", "scale", "scale"]),
        ("dtype", "Tensor"),
        ("dtype", "nonsense"),
        ("out_features", "many"),
        ("out_features", float("inf")),
        ("packing_group", 7),
    ],
)
def test_what_it_did_not_write_is_refused(change: str, value: object) -> None:
    """Each damaged field is a WeightError, never a crash or another weight."""
    facts = json.loads(q4.WeightSpec.of(q4.quantize(torch.randn(8, 64), "nf4")).to_json())
    facts[change] = value
    with pytest.raises(q4.WeightError):
        q4.WeightSpec.from_json(json.dumps(facts))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '{"version": 1}', "[" * 100_000], ids=lambda text: text[:4]
)
def test_no_spec_at_all_is_refused(text: str) -> None:
    """Text that is no spec is a WeightError that shows it."""
    with pytest.raises(q4.WeightError):
        q4.WeightSpec.from_json(text, where="a file")


def test_a_wrong_number_of_tensors_is_refused() -> None:
    """Tensors that do not match the fields are refused before anything is built."""
    spec = q4.WeightSpec.of(q4.quantize(torch.randn(8, 64), "nf4"))
    with pytest.raises(q4.WeightError):
        spec.build([torch.zeros(1)])
