"""A conversation with a model: each question sees all earlier messages, whose keys and values stay cached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_lm.generation.run import Generation, StopReason
from q4_lm.generation.sampling import Sampler
from q4_lm.generation.stream import TextStream
from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from q4_lm.generation.language_model import LanguageModel
    from q4_nn.blocks.cache import KVCache

__all__ = ["Conversation", "stream_text"]


def stream_text(model: LanguageModel, generation: Generation, stops: Sequence[str] = ()) -> Iterator[str]:
    """Yield a generation's text piece by piece, up to the first of some stop strings, which is not given.

    Args:
        model: Whose tokenizer it is.
        generation: What runs.
        stops: Texts that end it.

    Raises:
        InputError: A stop string is empty.
    """
    if not all(stops):
        raise InputError("generation", name="stops", rule="texts that are not empty", value="")
    stream = TextStream(model.tokenizer)
    held = ""  # may be the beginning of a stop string
    longest = max(map(len, stops), default=1) - 1

    def pieces() -> Iterator[str]:
        for token in generation:
            yield stream.push(token)
        yield stream.close()

    for piece in pieces():
        held += piece
        found = [at for stop in stops if (at := held.find(stop)) >= 0]
        if found:
            generation.stop_reason = StopReason.STOP_STRING
            yield held[: min(found)]
            return
        cut = len(held) - longest
        if cut > 0:
            yield held[:cut]
            held = held[cut:]
    yield held


class Conversation:
    """Questions and answers.

    Args:
        model: Has a chat template.
        system: The system message, or None.
        sampler: Chooses tokens. Defaults to greedy.
        max_tokens: Of one answer.
        stops: Texts that end an answer.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        system: str | None = None,
        sampler: Sampler | None = None,
        max_tokens: int = 512,
        stops: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.sampler = Sampler() if sampler is None else sampler
        self.max_tokens = max_tokens
        self.stops = tuple(stops)
        self._cache: KVCache | None = None
        self._seen: list[int] = []

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer to a question piece by piece; then both are part of the conversation.

        Raises:
            CheckpointError: There is no chat template, or it does not take these messages.
            InputError: The conversation is longer than the model's context.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self.model.chat(messages)
        cache, rest = self._room(tokens)
        generation = Generation(
            self.model.decoder,
            rest,
            max_tokens=self.max_tokens,
            sampler=self.sampler,
            stops=self.model.tokenizer.stops,
            cache=cache,
        )
        answer = []
        for piece in stream_text(self.model, generation, self.stops):
            answer.append(piece)
            yield piece
        self._seen = [*tokens, *generation.tokens][: cache.length]
        self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def _room(self, tokens: list[int]) -> tuple[KVCache, list[int]]:
        """Return a cache with space for an answer, and the tokens that it does not hold."""
        decoder = self.model.decoder
        limit = decoder.config.max_position_embeddings
        wanted = len(tokens) + self.max_tokens
        known = self._cache
        length = 0 if known is None else known.length
        if known is not None and known.capacity >= min(wanted, limit) and tokens[:length] == self._seen[:length]:
            return known, tokens[length:]
        if len(tokens) >= limit:
            rule = f"shorter than the model's context of {limit} tokens"
            raise InputError("conversation", name="messages", rule=rule, value=len(tokens))
        # Room for some more questions, so that not each one recomputes the whole conversation.
        self._cache, self._seen = decoder.make_cache(min(limit, 4 * wanted)), []
        return self._cache, tokens
