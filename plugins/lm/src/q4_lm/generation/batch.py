"""Several prompts at once: filled up on the left, so that all of them end at the same position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_lm.generation.sampling import Sampler
from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from q4_lm.models.transformer import TransformerDecoder

__all__ = ["generate_batch"]


@torch.inference_mode()
def generate_batch(
    decoder: TransformerDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 256,
    sampler: Callable[[int], Sampler] = lambda _: Sampler(),
    stops: Collection[int] = (),
) -> list[list[int]]:
    """Return the new tokens of each prompt; each gets what it would get alone, to rounding.

    Matrices are read once for all prompts, so that a batch takes little longer than its longest answer.

    Args:
        decoder: The model.
        prompts: Token numbers, at least one of each prompt.
        max_tokens: Most new tokens of each.
        sampler: A prompt's index → what chooses its tokens. Defaults to greedy.
        stops: Token numbers that end an answer; they are not given.

    Raises:
        InputError: There is no prompt, one is empty, ``max_tokens`` is not positive, or the longest prompt leaves no
            room in the context.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise InputError("generation", name="prompts", rule="at least one, none of them empty", value=len(prompts))
    if max_tokens < 1:
        raise InputError("generation", name="max_tokens", rule="a positive whole number", value=max_tokens)
    longest, context = max(map(len, prompts)), decoder.config.max_position_embeddings
    if longest > context:
        raise InputError("generation", name="prompts", rule=f"at most {context} tokens long", value=longest)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=decoder.device)
    capacity = min(longest + max_tokens - 1, context)
    cache = decoder.make_cache(capacity, len(prompts), padding=padding if bool(padding.any()) else None)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts], device=decoder.device)
    samplers = [sampler(index) for index in range(len(prompts))]
    found: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    while open_rows:
        logits = decoder(tokens, cache, last_only=True)[:, -1]
        following = [0] * len(prompts)
        for row in sorted(open_rows):
            following[row] = samplers[row](logits[row])
            if following[row] in stops:
                open_rows.discard(row)
                continue
            found[row].append(following[row])
            if len(found[row]) == max_tokens:
                open_rows.discard(row)
        if cache.length >= cache.capacity:
            break
        tokens = torch.tensor(following, device=decoder.device)[:, None]
    return found
