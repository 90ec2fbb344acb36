"""Feed-forward parts of several experts, of which a router chooses a few for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from q4_nn.blocks.feed_forward import FeedForward
from q4core import ConfigError

if TYPE_CHECKING:
    from q4_programs import ProgramBuilder, Value

__all__ = ["Experts"]


class Experts(nn.Module):
    """The sum of a token's chosen experts, by the weights that the router gives them.

    Parts: ``router``, and ``experts``, each a ``FeedForward``.

    Args:
        hidden_size: Features of a token.
        intermediate_size: Features inside an expert.
        count: Experts.
        chosen: How many of them a token has.
        normalised: Whether the weights of the chosen ones are divided by their sum.
        activation: As ``FeedForward`` takes it.
        bias: Whether router and experts have one.

    Raises:
        ConfigError: More experts are chosen than there are.

    Reference:
        Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        hidden_size: int,
        intermediate_size: int,
        count: int,
        chosen: int,
        *,
        normalised: bool = True,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= chosen <= count:
            raise ConfigError("experts", name="chosen", rule=f"from 1 to {count}, the experts", value=chosen)
        self.router = nn.Linear(hidden_size, count, bias=bias)
        made = [FeedForward(hidden_size, intermediate_size, activation=activation, bias=bias) for _ in range(count)]
        self.experts = nn.ModuleList(made)
        self.chosen = chosen
        self.normalised = normalised

    def extra_repr(self) -> str:
        """Return the options that torch prints before the parts."""
        return f"chosen={self.chosen}, normalised={self.normalised}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden_size] from [..., hidden_size]; the experts' weights are computed in float32, at least."""
        rows = x.reshape(-1, x.shape[-1])
        logits = self.router(rows)
        shares, numbers = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).topk(self.chosen)
        if self.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        y = torch.zeros_like(rows)
        for number in numbers.unique().tolist():
            places, ranks = (numbers == number).nonzero(as_tuple=True)
            part = self.experts[number](rows[places]) * shares[places, ranks, None].to(rows.dtype)
            y.index_add_(0, places, part.to(rows.dtype))
        return y.view(x.shape)

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:  # noqa: ARG002  # a program has no choice
        """Refuse: which layers run depends on the token."""
        builder.refuse("which experts run depends on the token")
