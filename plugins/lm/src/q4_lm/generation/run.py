"""The generation loop: prefill, decode, stop; with its statistics."""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

import attrs
import torch

from q4_lm.generation.decoding import LEAST_PROMPT, decoding_program, prompt_program
from q4_lm.generation.sampling import Sampler
from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from q4_lm.generation.decoding import DecodingProgram, PromptProgram
    from q4_lm.models.transformer import TransformerDecoder
    from q4_nn.blocks.cache import KVCache

__all__ = ["Generation", "StopReason"]


class StopReason(enum.Enum):
    """The reason why a generation ended."""

    STOP_TOKEN = "stop_token"  # noqa: S105  # not a password
    """The model gave a token that ends a text."""
    STOP_STRING = "stop_string"
    """A text appeared that was given to end it."""
    MAX_TOKENS = "max_tokens"
    """As many tokens as asked for."""
    CONTEXT_FULL = "context_full"
    """The model's context, or the cache, has no more room."""


@attrs.define
class Generation:
    """One run of a decoder over a prompt; iterate over it to get the new tokens one by one.

    It runs by the modules and parameters that the decoder has at the first token. A hook counts from when it is
    registered; a packed layer that was moved, or given another bias, is a ``LifecycleError``.

    Args:
        decoder: The model.
        prompt: Token numbers, at least one.
        max_tokens: Most new tokens, at least 1.
        sampler: Takes logits [vocabulary] and chooses a token. Defaults to greedy.
        stops: Token numbers that end the run; they are not given.
        cache: A cache to continue, whose content the prompt follows; None makes one that is just large enough.
        clock: Seconds, for the statistics.

    Raises:
        InputError: The prompt is empty, longer than the context, or holds a number that is no token; ``max_tokens`` is
            not positive.
    """

    decoder: TransformerDecoder = attrs.field(repr=False)
    prompt: Sequence[int] = attrs.field(repr=False)
    max_tokens: int = 256
    sampler: Callable[..., int] = attrs.field(factory=Sampler)
    stops: Collection[int] = ()
    cache: KVCache | None = attrs.field(default=None, repr=False)
    clock: Callable[[], float] = attrs.field(default=time.perf_counter, repr=False)
    tokens: list[int] = attrs.field(factory=list, init=False)
    """The new tokens so far, without the one that stopped the run."""
    stop_reason: StopReason | None = attrs.field(default=None, init=False)
    prefill_seconds: float = attrs.field(default=0.0, init=False)
    """Seconds from the start to the first token: prefill, and choosing it."""
    decode_seconds: float = attrs.field(default=0.0, init=False)
    """Seconds from the first token to the last one."""
    decode_steps: int = attrs.field(default=0, init=False)
    """Tokens that the decode seconds bought."""

    def __attrs_post_init__(self) -> None:
        """Check the arguments, and make a cache where there is none."""
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise InputError("generation", name="max_tokens", rule="a positive whole number", value=self.max_tokens)
        context = self.decoder.config.max_position_embeddings
        if self.cache is not None:
            context = self.cache.capacity - self.cache.length
        if not 1 <= len(self.prompt) <= context:
            raise InputError(
                "generation",
                name="prompt",
                rule=f"from 1 to {context} tokens long (the room that the context has)",
                value=len(self.prompt),
            )
        if self.cache is None:
            # The last new token is never fed back, so it needs no place.
            wanted = len(self.prompt) + self.max_tokens - 1
            self.cache = self.decoder.make_cache(min(wanted, context))

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second, prefill left out; None before the second token."""
        return self.decode_steps / self.decode_seconds if self.decode_steps and self.decode_seconds > 0 else None

    def _logits(self, tokens: Sequence[int], cache: KVCache) -> torch.Tensor:
        batch = torch.tensor([list(tokens)], dtype=torch.int64, device=self.decoder.device)
        with torch.inference_mode():
            logits: torch.Tensor = self.decoder(batch, cache, last_only=True)[0, -1]
        return logits

    def _first(self, cache: KVCache) -> int:
        """Return the token after the prompt."""
        if len(self.prompt) >= LEAST_PROMPT and (prefill := prompt_program(self.decoder, cache)) is not None:
            return self._choose(prefill(self.prompt, cache), prefill)
        return self.sampler(self._logits(self.prompt, cache))

    def _choose(self, logits: torch.Tensor, program: DecodingProgram | PromptProgram) -> int:
        known = (program.best(),) if isinstance(self.sampler, Sampler) else ()  # else any function of logits
        return self.sampler(logits, *known)

    def __iter__(self) -> Iterator[int]:
        """Yield the new tokens one by one."""
        cache = self.cache
        if cache is None or self.stop_reason is not None or self.tokens:
            raise InputError("generation", name="iteration", rule="done once", value=self.stop_reason)
        start = self.clock()
        token = self._first(cache)
        self.prefill_seconds = self.clock() - start
        program: DecodingProgram | None = None
        while True:
            if token in self.stops:
                self.stop_reason = StopReason.STOP_TOKEN
                return
            self.tokens.append(token)
            yield token
            if len(self.tokens) >= self.max_tokens:
                self.stop_reason = StopReason.MAX_TOKENS
                return
            if cache.length >= cache.capacity:
                self.stop_reason = StopReason.CONTEXT_FULL
                return
            # Only the model's own time counts, not what the caller does between two tokens.
            start = self.clock()
            if not self.decode_steps or (program is not None and program.has_new_hooks):
                program = decoding_program(self.decoder, cache)
            if program is None:
                token = self.sampler(self._logits((token,), cache))
            else:
                token = self._choose(program(token, cache), program)
            self.decode_seconds += self.clock() - start
            self.decode_steps += 1
