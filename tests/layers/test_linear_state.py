"""State dicts that hold something else than a layer's tensors: refused by key, the layer left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import q4core as q4
from tests.support.fakes import registry


def _layer() -> q4.Q4Linear:
    return q4.Session(registry=registry()).linear(q4.quantize(torch.ones(8, 64), "nf4"))


def _text(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight.spec", _text("[" * 100_000)),
        ("weight.spec", "a text"),
        ("weight.spec", None),
        ("weight.spec", torch.zeros(4)),
        ("weight.spec", torch.zeros(4, dtype=torch.uint8, device="meta")),
        ("weight.spec", torch.zeros(4, dtype=torch.uint8).to_sparse()),
        ("weight.qdata", "a text"),
        ("weight.qdata", 3),
        ("weight.qdata", torch.zeros(8, 32, dtype=torch.uint8, device="meta")),
        ("weight.scale", torch.ones(8, 1).to_sparse()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_tensor_of_the_layer_is_refused_by_key(key: str, value: Any) -> None:
    """Texts, numbers, and tensors without data or of another kind give one error that names key, rule and value."""
    layer = _layer()
    before = layer(torch.ones(1, 64))
    state = {**layer.state_dict(), key: value}
    with pytest.raises(RuntimeError, match=key) as caught:
        layer.load_state_dict(state)
    assert "must be" in str(caught.value)
    assert torch.equal(layer(torch.ones(1, 64)), before)


def test_a_spec_without_codes_is_refused() -> None:
    """A spec that leaves out a tensor that every weight has names what is missing."""
    layer = _layer()
    state = layer.state_dict()
    text = bytes(state["weight.spec"].tolist()).decode()
    state["weight.spec"] = _text(text.replace('"qdata", ', ""))
    with pytest.raises(RuntimeError, match="fields must be"):
        layer.load_state_dict(state)
