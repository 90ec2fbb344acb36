"""The generation loop, over a scripted model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from q4_lm.generation.run import Generation, StopReason
from q4_lm.models.config import TransformerConfig
from q4_nn.blocks.cache import KVCache
from q4core import InputError


class Script:
    """A stand-in for a decoder that says the next number of a script, and remembers what it was given."""

    device = torch.device("cpu")

    def __init__(self, script: list[int], context: int = 16) -> None:
        self.config = TransformerConfig(
            hidden_size=4, intermediate_size=4, vocab_size=10, max_position_embeddings=context
        )
        self.script = iter(script)
        self.given: list[list[int]] = []

    def make_cache(self, capacity: int) -> KVCache:
        """Return a cache."""
        return KVCache(1, 1, 4, capacity)

    def __call__(self, tokens: torch.Tensor, cache: KVCache, *, last_only: bool) -> torch.Tensor:
        """Return logits whose greatest is the script's next number."""
        assert last_only
        cache.require(tokens.shape[1])
        cache.advance(tokens.shape[1])
        self.given.append(tokens[0].tolist())
        return torch.nn.functional.one_hot(torch.tensor([[next(self.script)]]), 10).float()


def run(script: Script, prompt: list[int], **options: Any) -> Generation:
    """Run to the end."""
    generation = Generation(script, prompt, **options)  # type: ignore[arg-type]  # a stand-in
    assert list(generation) == generation.tokens
    return generation


def test_prefill_then_one_by_one() -> None:
    """The prompt goes in at once, then each new token alone; the last one is not fed back."""
    script = Script([4, 5, 6])
    generation = run(script, [1, 2, 3], max_tokens=3)
    assert generation.tokens == [4, 5, 6]
    assert script.given == [[1, 2, 3], [4], [5]]
    assert generation.stop_reason is StopReason.MAX_TOKENS


def test_stop_token_ends_and_is_not_given() -> None:
    """A stop token ends the run and is no part of the answer."""
    generation = run(Script([4, 9, 5]), [1], max_tokens=8, stops={9, 8})
    assert (generation.tokens, generation.stop_reason) == ([4], StopReason.STOP_TOKEN)


def test_stop_token_at_once() -> None:
    """An empty answer is legal."""
    generation = run(Script([9]), [1], max_tokens=8, stops={9})
    assert (generation.tokens, generation.stop_reason, generation.tokens_per_second) == (
        [],
        StopReason.STOP_TOKEN,
        None,
    )


def test_context_full() -> None:
    """A run ends when the context has no more room: the last token that fits has been fed, its answer is given."""
    generation = run(Script([4] * 20, context=5), [1, 2, 3], max_tokens=100)
    assert (len(generation.tokens), generation.stop_reason) == (3, StopReason.CONTEXT_FULL)


def test_prompt_may_fill_the_context() -> None:
    """A prompt as long as the context still gets one token."""
    generation = run(Script([4] * 9, context=3), [1, 2, 3], max_tokens=100)
    assert (generation.tokens, generation.stop_reason) == ([4], StopReason.CONTEXT_FULL)


def test_cache_is_just_large_enough() -> None:
    """The cache is made once, for prompt and answer, and never grows."""
    generation = Generation(Script([1] * 9), [1, 2, 3], max_tokens=4)  # type: ignore[arg-type]  # a stand-in
    assert generation.cache is not None
    assert generation.cache.capacity == 6


def test_conversation_goes_on_in_the_same_cache() -> None:
    """A second run behind the first one is given only what is new."""
    script = Script([4, 5, 6, 7])
    cache = script.make_cache(8)
    run(script, [1, 2], max_tokens=2, cache=cache)
    assert cache.length == 3
    run(script, [3], max_tokens=2, cache=cache)
    assert script.given == [[1, 2], [4], [3], [6]]


def test_statistics() -> None:
    """Prefill and decoding are timed apart; the caller's own time between two tokens is not counted."""
    ticks = itertools.chain([0.0, 2.0], itertools.count(10.0, 0.5))
    generation = run(Script([4] * 5), [1, 2], max_tokens=5, clock=lambda: next(ticks))
    assert generation.prefill_seconds == 2.0
    assert (generation.decode_steps, generation.decode_seconds) == (4, 2.0)
    assert generation.tokens_per_second == 2.0


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, True])
def test_max_tokens_must_be_positive(max_tokens: Any) -> None:
    """A run asks for at least one token."""
    with pytest.raises(InputError, match="max_tokens must be a positive whole number"):
        Generation(Script([]), [1], max_tokens=max_tokens)  # type: ignore[arg-type]  # a stand-in


@pytest.mark.parametrize("prompt", [[], [1] * 17])
def test_prompt_must_fit(prompt: list[int]) -> None:
    """An empty prompt and one longer than the context are refused."""
    with pytest.raises(InputError, match="prompt must be from 1 to 16 tokens long"):
        Generation(Script([]), prompt)  # type: ignore[arg-type]  # a stand-in


def test_a_run_runs_once() -> None:
    """Iterating a second time is an error, not a second answer."""
    generation = run(Script([4, 4]), [1], max_tokens=1)
    with pytest.raises(InputError, match="done once"):
        list(generation)
