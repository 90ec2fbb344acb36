"""Answers to several prompts at once: their tokens are rows of each product, which reads its weights once for all."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import attrs
import torch

from q4_lm.generation.decoding import batch_program
from q4_lm.generation.sampling import Sampler
from q4_programs import layers_of, refuse
from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from q4_lm.generation.decoding import BatchProgram
    from q4_lm.models.transformer import TransformerDecoder
    from q4_nn.blocks.batch_cache import BatchCache

__all__ = ["generate_batch"]

_BATCH = 16
_MOST = 32


@attrs.define
class _Row:
    """The answer to a prompt: its tokens so far, and those that the model has not seen yet."""

    index: int
    unseen: Sequence[int]
    choose: Callable[..., int]
    stops: Collection[int]
    room: int
    """New tokens that it may have: as many as asked for, or as the context has room for."""
    tokens: list[int] = attrs.field(factory=list)
    error: InputError | None = None

    def take(self, logits: torch.Tensor, best: int) -> bool:
        """Choose the next token, and return whether another one follows."""
        try:
            token = self.choose(logits, best) if isinstance(self.choose, Sampler) else self.choose(logits)
        except InputError as error:  # NaN: an end of this row alone
            self.error = error
            return False
        if token in self.stops:
            return False
        self.tokens.append(token)
        self.unseen = (token,)
        return len(self.tokens) < self.room


@torch.inference_mode()
def generate_batch(  # noqa: PLR0913  # one argument per option
    decoder: TransformerDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 256,
    sampler: Callable[[int], Callable[..., int]] = lambda _: Sampler(),
    stops: Collection[int] = (),
    batch: int = _BATCH,
) -> list[list[int]]:
    """Return the new tokens of each prompt, which are those that it gets alone.

    Where a backend runs the program of a batch, a prompt waits until one of ``batch`` slots is free, and each row ends
    by itself. Prompts are read in chunks of up to 128 tokens, next to the tokens of answers. Elsewhere modules run
    ``batch`` prompts at a time, filled up on the left; reports say why.

    Args:
        decoder: The model.
        prompts: Token numbers, at least one of each prompt.
        max_tokens: Most new tokens of each; fewer where the context is full.
        sampler: A prompt's index → what chooses its tokens, as ``Generation`` takes it. Defaults to greedy.
        stops: Token numbers that end an answer; they are not given.
        batch: Prompts at once, from 1 to 32. The cache has room for so many of the longest prompt and answer.

    Raises:
        InputError: There is no prompt, one is empty, holds a number that is no token, or leaves no room in the context;
            ``max_tokens`` or ``batch`` is out of range. Or the logits of some rows are NaN or infinite: the other rows
            are finished first, and the error's ``details["rows"]`` has what each row got.
    """
    _check(decoder, prompts, max_tokens, batch)
    batch = min(batch, len(prompts))
    context = decoder.config.max_position_embeddings
    rows = [
        _Row(index, prompt, sampler(index), stops, min(max_tokens, context + 1 - len(prompt)))
        for index, prompt in enumerate(prompts)
    ]
    capacity = min(max(map(len, prompts)) + max_tokens - 1, context)
    cache = decoder.make_batch_cache(capacity, batch)
    program = None
    if decoder.cache_dtype in {None, torch.float32}:
        program = batch_program(decoder, cache)
    else:
        refuse("batch TransformerDecoder", layers_of(decoder), f"a batch's cache is float32, not {decoder.cache_dtype}")
    if program is None:
        for start in range(0, len(rows), batch):
            _run_modules(decoder, rows[start : start + batch])
    else:
        _run_program(program, cache, rows)
    found = [row.tokens for row in rows]
    if errors := {row.index: row.error for row in rows if row.error is not None}:
        name, hint = f"logits of prompts {[*errors]}", "The tokens of all rows are in the error's details['rows']."
        error = InputError("generation", name=name, rule="finite", value="NaN or infinity", hint=hint, rows=found)
        raise error from next(iter(errors.values()))
    return found


def _check(decoder: TransformerDecoder, prompts: Sequence[Sequence[int]], max_tokens: int, batch: int) -> None:
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise InputError("generation", name="prompts", rule="at least one, none of them empty", value=len(prompts))
    if type(max_tokens) is not int or max_tokens < 1:
        raise InputError("generation", name="max_tokens", rule="a positive whole number", value=max_tokens)
    if type(batch) is not int or not 1 <= batch <= _MOST:
        raise InputError("generation", name="batch", rule=f"a whole number from 1 to {_MOST}", value=batch)
    longest, context = max(map(len, prompts)), decoder.config.max_position_embeddings
    if longest > context:
        raise InputError("generation", name="prompts", rule=f"at most {context} tokens long", value=longest)
    size = decoder.config.vocab_size
    if odd := [token for prompt in prompts for token in (min(prompt), max(prompt)) if not 0 <= token < size]:
        raise InputError("generation", name="prompts", rule=f"token numbers from 0 to {size - 1}", value=odd[0])


def _run_program(program: BatchProgram, cache: BatchCache, rows: Sequence[_Row]) -> None:
    """Run rows by a program; as one ends, the next one begins in its slot."""
    waiting = collections.deque(rows)
    live: dict[int, _Row] = {}
    while waiting or live:
        for slot in range(cache.batch):
            if slot not in live and waiting:
                live[slot], cache.lengths[slot] = waiting.popleft(), 0
        parts: list[tuple[int, Sequence[int]]] = []
        ready, left = [], program.most
        # Answers first, then what is left of prompts.
        for slot in sorted(live, key=lambda slot: len(live[slot].unseen)):
            taken = live[slot].unseen[:left]
            left -= len(taken)
            parts += [(slot, taken)] if taken else []
            ready += [slot] if len(taken) == len(live[slot].unseen) else []
            live[slot].unseen = live[slot].unseen[len(taken) :]
        logits = program(parts, range(len(ready)))
        if not ready:
            continue
        for slot, row, best in zip(ready, logits, program.best(), strict=True):
            if not live[slot].take(row, best):
                del live[slot]


def _run_modules(decoder: TransformerDecoder, rows: Sequence[_Row]) -> None:
    """Run rows by modules, filled up on the left, so that all of them end at the same position."""
    prompts = [row.unseen for row in rows]
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=decoder.device)
    capacity = min(longest + max(row.room for row in rows) - 1, decoder.config.max_position_embeddings)
    cache = decoder.make_cache(capacity, len(rows), padding=padding if bool(padding.any()) else None)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts], device=decoder.device)
    live = {*range(len(rows))}
    while live:
        logits = decoder(tokens, cache, last_only=True)[:, -1]
        best = logits.argmax(-1).tolist()
        live = {index for index in sorted(live) if rows[index].take(logits[index], best[index])}
        if cache.length >= cache.capacity:
            break
        tokens = torch.tensor([row.tokens[-1:] or [0] for row in rows], device=decoder.device)
