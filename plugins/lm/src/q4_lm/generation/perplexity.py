"""Perplexity of a model over a text, and the distance of two models' predictions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import torch

from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_lm.generation.language_model import LanguageModel

__all__ = ["Perplexity", "measure_perplexity"]

_WINDOW = 512


@attrs.frozen
class Perplexity:
    """The measure of a model over a text.

    Args:
        tokens: How many tokens were predicted.
        loss: Mean negative log-likelihood, in nats per token.
        kl_divergence: Mean divergence from the reference's predictions, in nats per token; None without one.
        equal_next_tokens: Share of tokens whose likeliest successor is the reference's; None without one.
    """

    tokens: int
    loss: float
    kl_divergence: float | None = None
    equal_next_tokens: float | None = None

    @property
    def perplexity(self) -> float:
        """The loss as a number of equally likely choices."""
        return math.exp(self.loss)


def measure_perplexity(
    model: LanguageModel,
    text: str,
    *,
    window: int | None = None,
    reference: LanguageModel | None = None,
    watch: Callable[[int, int], None] = lambda _done, _total: None,
) -> Perplexity:
    """Return how well a model predicts a text, piece by piece; nothing is seen across the pieces' ends.

    Args:
        model: The model.
        text: The text.
        window: Tokens of a piece. Defaults to 512, or to the model's context where that is shorter.
        reference: A model over the same vocabulary to compare with, such as the same file in another precision.
        watch: Called after each piece, with the number of those that are done, and of all.

    Raises:
        InputError: The text has fewer than two tokens, or the window is not between 2 and the model's context.
    """
    limit = model.decoder.config.max_position_embeddings
    window = min(_WINDOW, limit) if window is None else window
    if not 2 <= window <= limit:  # noqa: PLR2004  # one to see, one to predict
        raise InputError("perplexity", name="window", rule=f"from 2 to {limit}, the model's context", value=window)
    numbers = model.tokenizer.encode(text)
    pieces = [numbers[start : start + window] for start in range(0, len(numbers), window)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise InputError("perplexity", name="text", rule="at least two tokens long", value=len(numbers))
    loss = divergence = 0.0
    count = equal = 0
    for done, piece in enumerate(pieces, 1):
        predicted = _predictions(model, piece)
        following = torch.tensor(piece[1:], device=predicted.device)
        loss -= float(predicted.gather(1, following[:, None]).sum())
        count += len(following)
        if reference is not None:
            base = _predictions(reference, piece).to(predicted.device)
            divergence += float((base.exp() * (base - predicted)).sum())
            equal += int((base.argmax(-1) == predicted.argmax(-1)).sum())
        watch(done, len(pieces))
    if reference is None:
        return Perplexity(count, loss / count)
    return Perplexity(count, loss / count, divergence / count, equal / count)


@torch.inference_mode()
def _predictions(model: LanguageModel, piece: list[int]) -> torch.Tensor:
    """Return log-probabilities of each next token but the last: float64 [T - 1, vocabulary]."""
    decoder = model.decoder
    logits = decoder(torch.tensor([piece], device=decoder.device), decoder.make_cache(len(piece)))[0, :-1]
    return logits.double().log_softmax(-1)  # type: ignore[no-any-return]  # a tensor
