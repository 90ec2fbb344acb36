"""What torch's default dtype is, which loaders of models change, decides nothing here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4
from tests.support.samples import QUANTISED

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS = sorted(QUANTISED)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Another default dtype, which is restored afterwards."""
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


def _stored(weight: q4.PackedWeight) -> dict[str, tuple[torch.dtype, bytes]]:
    return {
        name: (tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in weight.tensors()
    }


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_bytes_do_not_follow(name: str, default_dtype: torch.dtype) -> None:
    """A weight is quantised to the same bytes, and decoded to the same numbers."""
    dense = torch.randn(6, 256, generator=torch.Generator().manual_seed(5)) * 0.1
    plain = q4.quantize(dense, name)
    values = q4.dequantize(plain, torch.float32)
    torch.set_default_dtype(default_dtype)
    weight = q4.quantize(dense, name)
    assert _stored(weight) == _stored(plain)
    assert torch.equal(q4.dequantize(weight, torch.float32), values)


@pytest.mark.parametrize("name", FORMATS)
def test_a_kind_is_proven_and_computed_alike(name: str, default_dtype: torch.dtype) -> None:
    """A kind of weight that is first met there is proven by the same probe, and its layers give the same bits."""
    generator = torch.Generator().manual_seed(6)
    weight = q4.quantize(torch.randn(40, 320 if name == "q8_0" else 384, generator=generator) * 0.1, name)
    x = torch.randn(19, weight.in_features, generator=generator)
    with q4.Session(q4.SessionConfig(compute_dtype=torch.float32)) as session:
        plain = session.linear(weight)(x)
    q4.reset_registry()
    torch.set_default_dtype(default_dtype)
    with q4.Session(q4.SessionConfig(compute_dtype=torch.float32)) as session:
        layer = session.linear(weight)
        assert layer.diagnostics().proven
        assert torch.equal(layer(x), plain)
