"""Small decoders of transformers by programs and by modules, and what ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from huggingface_models import dense_model

import q4core as q4
from q4_transformers import Q4Config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WIDE = {"max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}
SLIDING = {"sliding_window": 9, "head_dim": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral, sliding": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": ("Gemma3Text", {**SLIDING, "num_hidden_layers": 3, "sliding_window_pattern": 2}),
    "phi3": ("Phi3", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "olmo2": ("Olmo2", {}),
}


def pair(folder: Path, kind: str, options: dict[str, Any], **asked: Any) -> tuple[Any, Any]:
    """Return a random model that runs by programs, and the same one by modules."""
    model = dense_model(kind, **{**WIDE, **options})
    model.save_pretrained(folder)
    found = []
    for programs in (True, False):
        config = Q4Config(format="nf4", programs=programs, cache="off", **asked)
        found.append(type(model).from_pretrained(folder, quantization_config=config, dtype=torch.float32))
    return found[0], found[1]


def calls(model: Any) -> dict[str, int]:
    """Return how many calls of a model's decoder ran in which way."""
    return dict(model.model.forward.calls)


def ran(model: Any, count: int = 1) -> int:
    """Return how many calls ran by programs since the last time that they were counted, all others being none."""
    found = calls(model)
    assert set(found) <= {"programs"}, found
    model.model.forward.calls.clear()
    return found.get("programs", 0)


def prompt(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Return random tokens [batch, length]."""
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def near(one: torch.Tensor, other: torch.Tensor) -> None:
    """Check that logits differ by less than levels of activations do."""
    assert float((one - other).abs().max()) <= 1e-3 * float(other.abs().max())


@pytest.fixture(name="natively")
def natively_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run on the backend that has programs."""
    monkeypatch.setenv("Q4_PLUGINS", "cpu-native,dialects,lm,nn,safetensors")
    monkeypatch.setenv("Q4_CACHE", str(tmp_path_factory.getbasetemp() / "proofs"))
    q4.reset_registry()
    yield
    q4.reset_registry()


@pytest.fixture(name="llamas")
def llamas_fixture(tmp_path: Path) -> tuple[Any, Any]:
    """A Llama by programs, and by modules."""
    return pair(tmp_path, *KINDS["llama"])


@pytest.fixture(name="gemmas")
def gemmas_fixture(tmp_path: Path) -> tuple[Any, Any]:
    """A Gemma 3 with windows of 9 by programs, and by modules."""
    return pair(tmp_path, *KINDS["gemma3"])
