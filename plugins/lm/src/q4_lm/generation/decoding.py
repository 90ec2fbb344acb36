"""One token of one sequence through a decoder, by one call of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_nn.blocks.cache import CachePlaces
from q4_programs import Op, ProgramBuilder, Watch, layers_of, refuse
from q4core import Q4Error

if TYPE_CHECKING:
    from q4_nn.blocks.cache import KVCache

__all__ = ["DecodingProgram", "decoding_program"]


class DecodingProgram:
    """Takes a token, writes its keys and values into the cache, and gives the logits of the next one.

    Args:
        decoder: One whose parts emit operations, such as ``TransformerDecoder``.
        cache: Of one sequence; every call is given this one.

    Raises:
        EmissionError: A part emits nothing.
        Q4Error: Nobody runs the program.
    """

    def __init__(self, decoder: nn.Module, cache: KVCache) -> None:
        self.decoder = decoder
        device = cache.keys.device
        # The token, the position, and the place in each window.
        self._numbers = torch.zeros(1 + cache.place_count, dtype=torch.int64, device=device)
        builder = ProgramBuilder(decoder, device, f"decode {type(decoder).__name__}")
        numbers = builder.bound(self._numbers, "token and positions")
        places = CachePlaces(builder, cache, numbers)
        logits = builder.keep(builder.emit(decoder, builder.number(numbers, 0), cache=places))
        best = builder.keep(builder.step(Op.ARGMAX, logits, shape=(1,)))
        self._logits, self._best = builder.tensor(logits)[0], builder.tensor(best)
        self.bound = builder.bind()
        self._watch = Watch(builder.modules)
        self._cells = self._numbers.unbind()

    def change(self) -> str | None:
        """Return why the program no longer fits the decoder, or None."""
        return self._watch.change()

    def is_whole(self) -> bool:
        """Return whether the decoder, and the memory of all that is bound, is what it was."""
        return self.change() is None and self.bound.is_whole()

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


def decoding_program(decoder: Any, cache: KVCache) -> DecodingProgram | None:
    """Return the program of a decoder over a cache, made once; None where the modules run, which reports explain."""
    found = cache.program
    if isinstance(found, DecodingProgram) and found.decoder is decoder and found.is_whole():
        return found
    cache.program = made = None
    if not isinstance(decoder, nn.Module):  # a look-alike has no operations to emit
        return None
    try:
        cache.program = made = DecodingProgram(decoder, cache)
    except Q4Error as error:
        refuse(f"decode {type(decoder).__name__}", layers_of(decoder), error.summary)
    return made
