"""ggml's types whose scales are searched for: their errors next to ggml's own, and what is refused."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

import q4core as q4
from q4_gguf import form_of

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "Q4_K": ("q4_1", {"scale_kind": q4.ScaleKind.SUPER_BLOCK}),
    "Q6_K": ("q8_0", {"scale_kind": q4.ScaleKind.SUPER_BLOCK}),
    "IQ4_NL": ("iq4_nl", {}),
}
ERRORS = {
    "Q4_K": {
        "normal": 0.003576, "outliers": 0.008711, "laplace": 0.003567, "student": 0.003267, "uniform": 0.01575,
        "positive": 0.01847,
    },
    "Q6_K": {
        "normal": 0.0008951, "outliers": 0.002832, "laplace": 0.0009126, "student": 0.0009544, "uniform": 0.003852,
        "positive": 0.008372,
    },
    "IQ4_NL": {
        "normal": 0.003972, "outliers": 0.01055, "laplace": 0.003784, "student": 0.003604, "uniform": 0.01963,
        "positive": 0.04249,
    },
}  # fmt: skip
"""Root mean square errors of ggml 0.25.3's ``quantize_row_*_ref`` on ``matrices()``."""


def matrices() -> dict[str, torch.Tensor]:
    """Return matrices [32, 512] of several distributions."""
    random = np.random.default_rng(31)
    shape = (32, 512)
    normal = random.standard_normal(shape).astype(np.float32) * 0.05
    outliers = normal * np.where(random.random(shape) < 0.005, 20, 1).astype(np.float32)
    laplace = random.laplace(0, 0.03, shape).astype(np.float32)
    student = random.standard_t(3, shape).astype(np.float32) * np.float32(0.02)
    uniform = random.random(shape, np.float32) - np.float32(0.5)
    found = {"normal": normal, "outliers": outliers, "laplace": laplace, "student": student, "uniform": uniform}
    found["positive"] = random.random(shape, np.float32) + np.float32(0.1)
    return {name: torch.from_numpy(item) for name, item in found.items()}


def quantised(name: str, dense: torch.Tensor) -> q4.PackedWeight:
    """Return a weight in one of ggml's types."""
    form, choices = FORMS[name]
    return q4.quantize(dense, form, **choices)


@pytest.mark.parametrize("case", ERRORS["Q4_K"])
@pytest.mark.parametrize("name", FORMS)
def test_errors_are_no_larger_than_ggmls(name: str, case: str) -> None:
    """The root mean square error is at most 1.02 times ggml's."""
    dense = matrices()[case]
    error = (q4.dequantize(quantised(name, dense), torch.float32) - dense).double().square().mean().sqrt()
    assert float(error) <= 1.02 * ERRORS[name][case]


@pytest.mark.parametrize("name", FORMS)
def test_the_owner_reads_what_was_searched_for(name: str) -> None:
    """The bytes in a file have the type's values, by the package ``gguf``."""
    weight = quantised(name, matrices()["student"])
    form = form_of("m", weight)
    raw = torch.cat(list(form.rows())).numpy()
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert form.type_name == name
    np.testing.assert_array_equal(values, q4.dequantize(weight, torch.float32).numpy())


CASES = {
    "zeros": torch.zeros(2, 256),
    "one value": torch.full((2, 256), 0.3),
    "minus one value": torch.full((2, 256), -0.3),
    "one of a block": torch.eye(256)[:4] * -3,
    "a block of zeros": torch.cat((torch.zeros(3, 64), torch.randn(3, 192)), 1),
    "tiny": torch.randn(2, 256) * 1e-30,
    "subnormal": torch.full((2, 256), 1e-44),
    "large": torch.randn(2, 256) * 1e4,
    "positive": torch.rand(2, 256) + 1,
    "negative": -torch.rand(2, 256) - 1,
    "equal magnitudes": torch.where(torch.rand(2, 256) > 0.5, 1.0, -1.0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FORMS)
def test_blocks_of_every_kind(name: str, case: str) -> None:
    """Numbers are legal, and no value is further from its own than three steps' worth of its block."""
    dense = CASES[case]
    weight = quantised(name, dense)
    weight.check_values()
    values = q4.dequantize(weight, torch.float32)
    reach = torch.unflatten(dense, -1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    largest = dense.abs().amax()
    assert ((values - dense).abs() <= 0.2 * reach + 0.02 * largest + 1e-7).all()
    assert torch.equal(q4.dequantize(quantised(name, torch.cat((dense, dense))), torch.float32)[len(dense) :], values)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_rows_of_whole_super_blocks(name: str) -> None:
    """K must be a multiple of 256, and the block size is the type's."""
    with pytest.raises(q4.FormatError, match="K must be a multiple of the block size 256, got 320") as caught:
        quantised(name, torch.ones(2, 320))
    assert "512" in str(caught.value)
    form, choices = FORMS[name]
    for block in (8, 64):
        with pytest.raises(q4.FormatError, match="block_size"):
            q4.quantize(torch.ones(2, 256), form, block_size=block, **choices)
    weight = quantised(name, torch.ones(2, 256))
    assert (weight.block_size, weight.nested_block_size) == ((32, 8) if name == "Q4_K" else (16, 16))


@pytest.mark.parametrize("name", FORMS)
def test_values_beyond_float16_are_refused(name: str) -> None:
    """A step that float16 can't hold is an error that names the block."""
    with pytest.raises(q4.InputError, match="scale"):
        quantised(name, torch.full((2, 256), 1e12))
