"""Layers with one to three things wrong, at random, and what must hold of each."""

from __future__ import annotations

import contextlib
import random
import warnings
from typing import Any

import torch

import q4core as q4

Tensors = dict[str, torch.Tensor]
_DTYPES = [
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint32, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
]


def _change(tensors: Tensors, key: str, chance: random.Random) -> None:
    tensor = tensors[key]
    match chance.randrange(9):
        case 0:
            del tensors[key]
        case 1:
            tensors[key + chance.choice(("x", ".y", "_scale"))] = tensors.pop(key)
        case 2:
            tensors[key] = tensor.to(chance.choice(_DTYPES))
        case 3:
            tensors[key] = tensor.reshape(-1)
        case 4:
            tensors[key] = tensor[None]
        case 5:
            tensors[key] = tensor[..., : chance.randrange(3)] if tensor.dim() else tensor.expand(3)
        case 6:
            sizes = [chance.randrange(3) for _ in range(chance.randrange(5))]
            tensors[key] = torch.zeros(sizes, dtype=tensor.dtype)
        case 7:
            count = tensor.numel() * tensor.dtype.itemsize
            random_bytes = torch.tensor([chance.randrange(256) for _ in range(count)], dtype=torch.uint8)
            tensors[key] = random_bytes.view(tensor.dtype).reshape(tensor.shape)
        case _:
            other = chance.choice(list(tensors))
            tensors[key], tensors[other] = tensors[other], tensors[key]


def judge_mutant(tensors: Tensors, seed: int, **facts: Any) -> None:
    """Change some tensors; whatever is found is read and decoded, or has problems, and no dialect raises."""
    chance, changed = random.Random(seed), dict(tensors)
    for _ in range(chance.choice((1, 1, 2, 3))):
        if changed:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # what torch itself can't do
                _change(changed, chance.choice(list(changed)), chance)
    known = {dialect.name: dialect for dialect in q4.dialects()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", q4.Q4PluginWarning)
        schema = q4.detect(changed, **facts)
        if schema is None or q4.validate(schema, changed, **facts):
            return
        for layer in schema.layers.values():
            q4.dequantize(known[layer.dialect].read(layer, changed.__getitem__))
