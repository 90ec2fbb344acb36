"""The choice of the next token: greedy, or drawn after temperature, top-k and top-p."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from q4_lm.generation.threads import one_thread
from q4core import ConfigError, InputError

__all__ = ["Sampler"]


def _check_number(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    del instance
    low, high = _RANGES[attribute.name]
    whole = attribute.name in {"top_k", "seed"}
    legal = isinstance(value, int) if whole else isinstance(value, (int, float)) and math.isfinite(value)
    if isinstance(value, bool) or not legal or not low <= value <= high:  # type: ignore[operator]  # a number by now
        kind = "a whole number" if whole else "a finite number"
        raise ConfigError("sampling", name=attribute.name, rule=f"{kind} from {low} to {high}", value=value)
    if attribute.name == "top_p" and value == 0:
        raise ConfigError("sampling", name="top_p", rule="greater than 0", value=value)


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e6),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "seed": (0, 2**63 - 1),
}


_LEAST = torch.finfo(torch.float32).tiny  # a lower divisor may be 0 in float32


@attrs.define
class Sampler:
    """Draws tokens from logits.

    The same logits and the same seed give the same tokens on every device: drawing happens on the CPU, in float32, by
    one thread.

    Args:
        temperature: Divides the logits; 0 is greedy.
        top_k: Only the k likeliest tokens; 0 keeps all. Ties at the last place stay in.
        top_p: Only the fewest likeliest tokens whose probabilities reach p; 1 keeps all. The likeliest always stays in.
        seed: Of the random generator.

    Raises:
        ConfigError: A value is out of range.
    """

    temperature: float = attrs.field(default=0.0, validator=_check_number)
    top_k: int = attrs.field(default=0, validator=_check_number)
    top_p: float = attrs.field(default=1.0, validator=_check_number)
    seed: int = attrs.field(default=0, validator=_check_number)
    _generator: torch.Generator = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Make the generator."""
        self._generator = torch.Generator().manual_seed(self.seed)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the float32 probabilities [V] that tokens are drawn with; one-hot when greedy.

        Args:
            logits: [V] float.

        Raises:
            InputError: A logit is NaN or infinite.
        """
        if self.temperature == 0:
            return torch.nn.functional.one_hot(_checked(logits).argmax(), logits.numel()).to(torch.float32)
        index, shares = self._likeliest(_checked(logits))
        return shares if index is None else torch.zeros(logits.numel()).index_copy_(0, index, shares)

    def _likeliest(self, values: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the tokens that may be drawn, all where it is None, and their probabilities."""
        index = None
        if 0 < self.top_k < values.numel():
            index = (values >= values.topk(self.top_k).values[-1]).nonzero()[:, 0]
            values = values[index]
        # The greatest logit is subtracted first, so that a tiny temperature can't overflow.
        shares = ((values - values.max()) / max(self.temperature, _LEAST)).softmax(-1)
        if self.top_p < 1:
            # All below this share hold half of 1 - p at most, and need not be put in order.
            chosen = (shares >= (1 - self.top_p) / (2 * shares.numel())).nonzero()[:, 0]
            ordered, order = shares[chosen].sort(descending=True, stable=True)
            chosen = chosen[order[ordered.cumsum(-1) - ordered < self.top_p]]
            index, shares = chosen if index is None else index[chosen], shares[chosen]
            shares = shares / shares.sum()
        return index, shares

    def __call__(self, logits: torch.Tensor, best: int | None = None) -> int:
        """Return the number of the next token.

        Args:
            logits: [V] float.
            best: Index of the greatest (of a NaN, where there is one), where it is known.

        Raises:
            InputError: A logit is NaN or infinite.
        """
        if self.temperature == 0 and best is not None and math.isfinite(float(logits[best])):
            return best
        with one_thread():
            values = _checked(logits)
            if self.temperature == 0:
                return int(values.argmax())
            index, shares = self._likeliest(values)
            reached = shares.cumsum(-1, dtype=torch.float64)
            # Above 0 and at most their sum: a share of 0 is never drawn.
            drawn = reached[-1] * (1 - torch.rand(1, generator=self._generator, dtype=torch.float64))
            place = torch.searchsorted(reached, drawn)
            return int(place if index is None else index[place])


def _checked(logits: torch.Tensor) -> torch.Tensor:
    values = logits.detach().to("cpu", torch.float32)
    # Their extremes are finite if all are, NaN included; 9 µs for 49,152 logits, where isfinite takes 77.
    if not all(math.isfinite(float(extreme)) for extreme in torch.aminmax(values)):
        raise InputError(
            "sampling",
            name="logits",
            rule="finite",
            value="NaN or infinity",
            hint="A layer computed a wrong number; compare with compute path dequant_matmul_only.",
        )
    return values
