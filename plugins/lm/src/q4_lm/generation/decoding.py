"""Tokens through a decoder by calls of programs: one token, the chunks of a prompt, or any of several sequences."""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from q4_nn.blocks.batch_cache import BatchPlaces
from q4_nn.blocks.cache import CachePlaces
from q4_programs import Op, ProgramBuilder, Watch, layers_of, refuse
from q4core import InputError, Q4Error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_nn.blocks.batch_cache import BatchCache
    from q4_nn.blocks.cache import KVCache
    from q4_programs import BoundProgram, Value

__all__ = [
    "LEAST_PROMPT",
    "BatchProgram",
    "DecodingProgram",
    "PromptProgram",
    "batch_program",
    "decoding_program",
    "prompt_program",
]

_CHUNK = 128
"""Tokens of a chunk: as many as products need to be as fast as they get, and few enough to stay in a core's cache."""
LEAST_PROMPT = 32
"""Tokens from which a prompt is worth the proof of its program."""


class _Programs:
    """Programs of a decoder over a cache.

    Args:
        decoder: One whose parts emit operations, such as ``TransformerDecoder``.
        device: Of the cache that every call is given.

    Raises:
        EmissionError: A part emits nothing.
        Q4Error: Nobody runs the programs.
    """

    verb = ""

    def __init__(self, decoder: nn.Module, device: torch.device) -> None:
        self.decoder = decoder
        self._device = device
        self._programs: list[BoundProgram] = []
        self._watches: list[Watch] = []

    def _builder(self, part: str = "") -> ProgramBuilder:
        return ProgramBuilder(self.decoder, self._device, f"{self.verb} {type(self.decoder).__name__}{part}")

    def _bind(self, builder: ProgramBuilder) -> BoundProgram:
        self._programs.append(builder.bind())
        self._watches.append(Watch(builder.modules))
        return self._programs[-1]

    @property
    def has_new_hooks(self) -> bool:
        """Whether anybody has registered a hook, on any module, since ``change`` last found none here."""
        return any(watch.has_new_hooks for watch in self._watches)

    def change(self) -> str | None:
        """Return why a program no longer fits the decoder, or None."""
        return next((change for watch in self._watches if (change := watch.change()) is not None), None)

    def is_whole(self) -> bool:
        """Return whether the decoder, and the memory of all that is bound, is what it was."""
        return self.change() is None and all(program.is_whole() for program in self._programs)


class DecodingProgram(_Programs):
    """Takes a token, writes its keys and values into the cache, and gives the logits of the next one."""

    verb = "decode"

    def __init__(self, decoder: nn.Module, cache: KVCache) -> None:
        super().__init__(decoder, cache.keys.device)
        # The token, the position, and the place in each window.
        self._numbers = torch.zeros(1 + cache.place_count, dtype=torch.int64, device=self._device)
        builder = self._builder()
        places = CachePlaces(builder, cache, builder.bound(self._numbers, "token and positions"))
        logits = builder.keep(builder.emit(decoder, places.tokens, cache=places))
        self._logits, self._best = builder.tensor(logits)[0], _best(builder, logits)
        self.bound = self._bind(builder)
        self._cells = self._numbers.unbind()

    @torch.inference_mode()
    def __call__(self, token: int, cache: KVCache) -> torch.Tensor:
        """Return logits [vocabulary], which the next call overwrites.

        Args:
            token: The token after those in the cache.
            cache: That of the program.

        Raises:
            InputError: The token is not in the vocabulary, or the cache is full.
            LifecycleError: Memory was moved, or a layer closed.
        """
        for cell, number in zip(self._cells, (token, *cache.next_places()), strict=True):
            cell.fill_(number)
        self.bound()
        cache.advance(1)
        return self._logits

    def best(self) -> int:
        """Return the token of the greatest logit of the last call."""
        return int(self._best)


class PromptProgram(_Programs):
    """Takes a prompt in chunks, writes their keys and values into the cache, and gives the logits of the next token.

    A chunk is one run of a program, and so is the head of the last token; neither makes a tensor.
    """

    verb = "prompt"

    def __init__(self, decoder: nn.Module, cache: KVCache) -> None:
        super().__init__(decoder, cache.keys.device)
        self._most = _CHUNK if cache.most_places is None else min(_CHUNK, cache.most_places)
        # The tokens, their positions, and their places in each window.
        self._numbers = torch.zeros((1 + cache.place_count, self._most), dtype=torch.int64, device=self._device)
        self._count = torch.ones(1, dtype=torch.int64, device=self._device)
        builder = self._builder()
        builder.of_tokens(builder.bound(self._count, "number of tokens"), self._most)
        places = CachePlaces(builder, cache, builder.bound(self._numbers, "tokens and positions"))
        features = builder.tensor(builder.keep(builder.emit(decoder, places.tokens, cache=places, part="body")))
        self.bound = self._bind(builder)
        self._features = features.unbind()
        self._limit = self.bound.program.limit(self.bound.program.steps[0])
        self._last = torch.zeros_like(features[:1])
        builder = self._builder(", head")
        logits = builder.keep(builder.emit(decoder, builder.bound(self._last, "features"), part="head"))
        self._logits, self._best = builder.tensor(logits)[0], _best(builder, logits)
        self.head = self._bind(builder)
        self._steps = torch.arange(self._most, device=self._device)

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Return logits [vocabulary], which the next call overwrites.

        Args:
            tokens: Those after the ones in the cache, at least one.
            cache: That of the program.

        Raises:
            InputError: A token is not in the vocabulary, or the cache has no room for them.
            LifecycleError: Memory was moved, or a layer closed.
        """
        given = torch.tensor([*tokens], dtype=torch.int64, device=self._device)
        cache.require(len(given))
        low, high = (int(value) for value in torch.aminmax(given))  # before anything is written
        if low < 0 or high >= self._limit:
            rule = f"from 0 to {self._limit - 1}"
            raise InputError("decoder", name="tokens", rule=rule, value=low if low < 0 else high)
        for start in range(0, len(given), self._most):
            count = min(self._most, len(given) - start)
            self._numbers[0, :count].copy_(given[start : start + count])
            for row, place in zip(self._numbers[1:], cache.next_places(count), strict=True):
                torch.add(self._steps, place, out=row)
            self._count.fill_(count)
            self.bound()
            cache.advance(count)
        self._last[0].copy_(self._features[count - 1])
        self.head()
        return self._logits

    def best(self) -> int:
        """Return the token of the greatest logit of the last call."""
        return int(self._best)


class BatchProgram(_Programs):
    """Takes tokens of any sequences of a cache, and gives the logits of the tokens that follow.

    The tokens of a run are rows of each product, whose weights are read once for all. A sequence has the bits that it
    has alone, whatever else is in its run.
    """

    verb = "batch"

    def __init__(self, decoder: nn.Module, cache: BatchCache) -> None:
        super().__init__(decoder, cache.device)
        self.most = max(_CHUNK, cache.batch)
        """Tokens of a run at most."""
        self._count, self._rows = torch.ones((2, 1), dtype=torch.int64).unbind()
        builder = self._builder()
        builder.of_tokens(builder.bound(self._count, "number of tokens"), self.most)
        self._places = BatchPlaces(builder, cache, self.most)
        x = builder.emit(decoder, self._places.tokens, cache=self._places, part="body")
        self._features = builder.tensor(builder.keep(x))
        self.bound = self._bind(builder)
        most = max(2, cache.batch)
        self._index = array("q", bytes(8 * most))
        self._ends = torch.frombuffer(self._index, dtype=torch.int64)
        self._last = self._features.new_zeros(most, self._features.shape[1])
        builder = self._builder(", head")
        builder.of_tokens(builder.bound(self._rows, "number of sequences"), most)
        logits = builder.keep(builder.emit(decoder, builder.bound(self._last, "features"), part="head"))
        self._logits, self._best = builder.tensor(logits), _best(builder, logits)
        self.head = self._bind(builder)

    @torch.inference_mode()
    def __call__(self, parts: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[int] = ()) -> torch.Tensor:
        """Return logits [wanted, vocabulary], which the next call overwrites.

        Args:
            parts: Sequences of the cache, each once, and the tokens that follow theirs; at most ``most`` tokens in all.
            wanted: Indices of the parts after whose last tokens logits are asked for, rising.

        Raises:
            InputError: A token is not in the vocabulary, or the cache has no room. Nothing has been written.
            LifecycleError: Memory was moved, or a layer closed.
        """
        self._count.fill_(self._places.take(parts))
        self.bound()
        self._places.advance(parts)
        if not wanted:
            return self._logits[:0]
        ends, rows = [*itertools.accumulate(len(tokens) for _, tokens in parts)], len(wanted)
        self._index[:rows] = array("q", [ends[index] - 1 for index in wanted])
        torch.index_select(self._features, 0, self._ends[:rows], out=self._last[:rows])
        self._rows.fill_(rows)
        self.head()
        return self._logits[:rows]

    def best(self) -> list[int]:
        """Return the token of the greatest logit of each row of the last call."""
        return self._best[: int(self._rows)].tolist()


def _best(builder: ProgramBuilder, logits: Value) -> torch.Tensor:
    """Return where the token of the greatest logit of each row will be."""
    return builder.tensor(builder.keep(builder.step(Op.ARGMAX, logits, shape=logits.shape[:1])))


_Kind = TypeVar("_Kind", bound=_Programs)


def _program(kind: type[_Kind], decoder: Any, cache: Any) -> _Kind | None:
    found = cache.programs.get(kind)
    if isinstance(found, kind) and found.decoder is decoder and found.is_whole():
        return found
    cache.programs.pop(kind, None)
    if not isinstance(decoder, nn.Module):  # a look-alike has no operations to emit
        return None
    try:
        made: _Kind = kind(decoder, cache)
        cache.programs[kind] = made
    except Q4Error as error:
        refuse(f"{kind.verb} {type(decoder).__name__}", layers_of(decoder), error.summary)
        return None
    return made


def decoding_program(decoder: Any, cache: KVCache) -> DecodingProgram | None:
    """Return the program of a decoder over a cache, made once; None where the modules run, which reports explain."""
    return _program(DecodingProgram, decoder, cache)


def prompt_program(decoder: Any, cache: KVCache) -> PromptProgram | None:
    """Return the program of prompts, as ``decoding_program`` does; None also where no backend runs it."""
    found = _program(PromptProgram, decoder, cache)
    return None if found is None or found.bound.record.backend == "reference" else found


def batch_program(decoder: Any, cache: BatchCache) -> BatchProgram | None:
    """Return the program of several sequences, as ``prompt_program`` does."""
    found = _program(BatchProgram, decoder, cache)
    return None if found is None or found.bound.record.backend == "reference" else found
