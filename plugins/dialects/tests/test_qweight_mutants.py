"""Damaged layers of GPTQ and AWQ: a typed error, or a reading of what is there; never a crash."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from qwords import Tensors, awq_layer, config, gemv_layer, gptq_layer, make_layer

import q4core as q4

_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bool)
_VALUES: tuple[Any, ...] = (
    None,
    0,
    -1,
    3,
    8,
    10**30,
    1.5,
    "",
    "gemv",
    "gptq_v2",
    "marlin",
    [],
    {},
    {"(": {"bits": 3}},
    True,
)
_FACTS = (
    "bits",
    "group_size",
    "checkpoint_format",
    "packing_format",
    "version",
    "pack_dtype",
    "dynamic",
    "extra_config",
)
_METHODS: tuple[Any, ...] = ("gptq", "awq", "auto-round", "other", 7, None)


def _bases() -> dict[str, Tensors]:
    layer = make_layer(32, 128, 32, scattered=True)
    plain = make_layer(32, 128, 32)
    return {
        "gptq": gptq_layer(layer, version=1),
        "gptq-v2": gptq_layer(plain, version=2, has_groups=False),
        "awq": awq_layer(plain),
        "awq-gemv": gemv_layer(plain, 32),
    }


def _mutate(tensors: Tensors, random: np.random.Generator) -> None:
    """Damage one tensor: drop, rename, retype, reshape, cut, or change numbers."""
    key = str(random.choice(sorted(tensors)))
    tensor = tensors.pop(key)
    kind = int(random.integers(7))
    if kind == 1:
        key = f"{key}{random.choice(['_', '.weight', '_scale'])}"
    elif kind == 2:
        tensor = tensor.to(_DTYPES[int(random.integers(len(_DTYPES)))])
    elif kind == 3:
        tensor = tensor.reshape(-1) if random.integers(2) else tensor[None]
    elif kind == 4:
        tensor = tensor[: int(random.integers(3))] if random.integers(2) else tensor[..., : int(random.integers(3))]
    elif kind == 5:
        tensor = tensor.T.contiguous() if tensor.dim() == 2 else tensor.flip(0)
    elif kind == 6:
        tensor = torch.full_like(tensor, -7) if random.integers(2) else torch.cat([tensor, tensor])
    if kind:
        tensors[key] = tensor


@pytest.mark.parametrize("name", ["gptq", "gptq-v2", "awq", "awq-gemv"])
def test_mutants_end_in_typed_errors(name: str) -> None:
    """Of 250 mutants each is refused by an error of q4core, or what it holds is read."""
    dialects = {item.name: item for item in q4.dialects()}
    refused = 0
    for seed in range(250):
        random = np.random.default_rng([seed, len(name)])
        tensors = dict(_bases()[name])
        for _ in range(1 + seed % 3):
            if tensors and not any(tensor.dim() == 0 for tensor in tensors.values()):
                _mutate(tensors, random)
        facts: dict[str, Any] = {
            str(random.choice(_FACTS)): _VALUES[int(random.integers(len(_VALUES)))] for _ in range(2)
        }
        given = config(_METHODS[int(random.integers(len(_METHODS)))], **facts)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a dialect that raises is left out with a warning
            try:
                schema = q4.detect_or_fail(tensors, config=given)
                for layer in schema.layers.values():
                    weight = dialects[layer.dialect].read(layer, tensors.__getitem__)
                    assert q4.dequantize(weight, torch.float32).shape == layer.shape
            except q4.Q4Error:
                refused += 1
    assert refused > 100
