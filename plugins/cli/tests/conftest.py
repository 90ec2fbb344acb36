"""Fixtures of the command's tests: a folder of their own, a registry of the reference alone, a small dense model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

import q4core as q4
from tests.support.fakes import reference_alone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["reference_alone"]


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test run in a folder of its own, with the plugins that are installed."""
    monkeypatch.chdir(tmp_path)
    yield
    q4.reset_registry()


@pytest.fixture
def dense_file(tmp_path: Path) -> Path:
    """Return a small dense model: two layers that can be packed, one that can't, and what always stays dense."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": random(32, 64),
        "model.layers.0.q_proj.weight": random(64, 128).to(torch.bfloat16),
        "model.layers.0.q_proj.bias": random(64),
        "model.layers.0.norm.weight": random(64),
        "model.layers.1.q_proj.weight": random(48, 128),
        "model.layers.1.odd.weight": random(16, 40),
        "lm_head.weight": random(32, 64),
        "positions": torch.arange(10),
    }
    path = tmp_path / "dense.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path
