"""Packed layers that nothing here reads, by what writes them, and files that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "HALF",
    "I8",
    "I16",
    "I32",
    "U8",
    "U32",
    "UNREAD",
    "Tensors",
    "add_tensors",
    "has_dialects",
    "ints",
    "layers",
]

Tensors = dict[str, torch.Tensor]


def ints(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return zeros of an integer dtype."""
    return torch.zeros(shape, dtype=dtype)


I8, U8, I16, I32, U32 = torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32
HALF = torch.ones(4, 4, dtype=torch.float16)
UNREAD: dict[str, Tensors] = {
    "exl2": {
        "q_weight": ints(I32, 8, 16),
        "q_scale": ints(I32, 4, 2),
        "q_scale_max": HALF[0],
        "q_groups": ints(I16, 8),
        "q_invperm": ints(I16, 64),
    },
    "exl3": {"trellis": ints(I16, 4, 4, 64), "suh": HALF[0], "svh": HALF[0], "mcg": ints(I32)},
    "quanto": {
        "weight._data._data": ints(U8, 16, 32),
        "weight._scale": HALF,
        "weight._shift": ints(I8, 4, 4),
        "input_scale": HALF[0, 0],
    },
    "quanto-int8": {"weight._data": ints(I8, 16, 64), "weight._scale": HALF},
    "aqlm": {"codes": ints(I16, 16, 8, 1), "codebooks": HALF.reshape(1, 2, 1, 8), "scales": HALF.reshape(16, 1, 1, 1)},
    "svdquant": {
        "qweight": ints(I8, 16, 32),
        "wscales": HALF,
        "smooth": HALF[0],
        "lora_down": HALF,
        "lora_up": HALF,
    },
    "int8": {"weight": ints(I8, 16, 64), "weight_scale": HALF},
    "of nobody": {"codes_hi": ints(I16, 16, 8), "row_scales": HALF[0]},
    "bitnet": {"weight": ints(U8, 16, 64), "weight_scale": HALF[0, :1]},
}


def layers(tensors: Tensors, *modules: str) -> Tensors:
    """Return the tensors under each module, with a bias and a norm that are dense."""
    found = {f"{module}.{name}": tensor.clone() for module in modules for name, tensor in tensors.items()}
    return {**found, "a.bias": torch.ones(16), "norm.weight": torch.ones(4)}


def add_tensors(path: Path, tensors: Tensors) -> Path:
    """Write a file with a layer ``proj`` that is read, and these tensors."""
    q4.save_checkpoint(path, {"proj": q4.quantize(torch.randn(8, 64), "nf4")}, dialect="bitsandbytes")
    save_file({**load_file(path), **tensors}, path)
    return path


@pytest.fixture(params=[True, False], ids=["dialects", "core alone"])
def has_dialects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Run with the plugin that knows most dialects, and without any."""
    monkeypatch.setenv("Q4_PLUGINS", "dialects,safetensors" if request.param else "safetensors")
    q4.reset_registry()
    yield bool(request.param)
    q4.reset_registry()
