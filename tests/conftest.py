"""Fixtures that several files of tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from shared_fixtures import content, keeps, other, state, threads
from sharing import MODES

import q4core as q4
from q4_conformance.zoo import plugin
from q4core.mutable import MutableMode, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["content", "keeps", "other", "state", "threads"]


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test run in a folder of its own, with the plugins that are installed."""
    monkeypatch.chdir(tmp_path)
    yield
    q4.reset_registry()


@pytest.fixture
def reference_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out whatever kernels happen to be installed, so that the process's registry has the reference alone."""
    monkeypatch.setenv("Q4_PLUGINS", "dialects,gguf,nn")
    q4.reset_registry()
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


@pytest.fixture(params=MODES, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> MutableMode:
    """Return each mode in turn."""
    return MutableMode(request.param)


@pytest.fixture
def locks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes agree by the core's own locks, also where a plugin with atomics is installed."""
    monkeypatch.setattr(shared, "find_cells", lambda: None)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs animals of the zoo, as a plugin of this process and of its children."""

    def installed(*names: str) -> None:
        plugin.release(*names)
        monkeypatch.setenv("Q4_PLUGIN_MODULES", plugin.MODULE)
        monkeypatch.setenv(plugin.VARIABLE, ",".join(names))
        q4.reset_registry()

    yield installed
    monkeypatch.undo()
    q4.reset_registry()
