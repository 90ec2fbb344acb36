"""The feed-forward part of a block: one hidden layer, gated or not."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from q4_nn.blocks.joined import emit_project, project
from q4_programs import Op
from q4core import ConfigError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_programs import ProgramBuilder, Value

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS", "FeedForward"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
}
"""Name → function; ``gelu_tanh`` is what Hugging Face calls ``gelu_pytorch_tanh``."""
_OPS = {"silu": Op.SILU, "gelu": Op.GELU, "gelu_tanh": Op.GELU_TANH, "relu": Op.RELU}


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return GPT-OSS's gate: ``(up + 1) · gate · sigmoid(1.702 · gate)``, both of them bounded by 7."""
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * gate * (gate * 1.702).sigmoid()


GATED_ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"clamped_swiglu": _clamped_swiglu}
"""Name → function of what the gate and the other layer give, where the gate is not merely multiplied."""


class FeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate.

    Parts: ``gate_proj`` (gated), ``up_proj``, ``down_proj``. Packing may replace the first two by one
    ``gate_up_proj``.

    Args:
        hidden_size: Features of a token.
        intermediate_size: Features inside.
        activation: ``silu`` (SwiGLU where gated), ``gelu``, ``gelu_tanh`` or ``relu``; where gated, also
            ``clamped_swiglu``.
        gated: Whether there is a gate.
        bias: Whether the layers have one.
        dropout: Share of the inner features that training drops.

    Raises:
        ConfigError: There is no such activation.

    Reference:
        Shazeer, GLU Variants Improve Transformer.
    """

    joins = {"gate_up_proj": ("gate_proj", "up_proj")}  # noqa: RUF012  # read, never written
    """Layers that share their x, by the name of the one that may take their place."""

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        known = [*ACTIVATIONS, *(GATED_ACTIVATIONS if gated else ())]
        if activation not in known:
            close = closest_name(activation, known)
            hint = f"Did you mean {close!r}?" if close else None
            rule = f"one of {', '.join(known)}"
            raise ConfigError("feed-forward", name="activation", rule=rule, value=activation, hint=hint)
        self.gate_proj: nn.Module | None = nn.Linear(hidden_size, intermediate_size, bias=bias) if gated else None
        self.up_proj: nn.Module | None = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.gate_up_proj: nn.Module | None = None
        self.down_proj: nn.Module = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation
        self.gated = gated
        self.dropout = dropout

    def extra_repr(self) -> str:
        """Return the options that torch prints before the parts."""
        return f"activation={self.activation}, gated={self.gated}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden_size] from [..., hidden_size]."""
        if self.gated:
            gate, up = project(self, "gate_up_proj", x)
            both = GATED_ACTIVATIONS.get(self.activation)
            inner = ACTIVATIONS[self.activation](gate) * up if both is None else both(gate, up)
        else:
            inner = ACTIVATIONS[self.activation](self.up_proj(x))  # type: ignore[misc]  # only a gated one may be joined
        if self.dropout:
            inner = nn.functional.dropout(inner, self.dropout, self.training)
        y: torch.Tensor = self.down_proj(inner)
        return y

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:
        """Emit what an evaluation computes."""
        if self.activation in GATED_ACTIVATIONS:
            builder.refuse(f"{self.activation} is no operation of a program")
        if self.gated:
            gate, up = emit_project(self, "gate_up_proj", builder, x)
            inner = builder.step(Op.MULTIPLY, builder.step(_OPS[self.activation], gate), up)
        else:
            inner = builder.step(_OPS[self.activation], builder.emit(self.up_proj, x))  # type: ignore[arg-type]  # as above
        y: Value = builder.emit(self.down_proj, inner)
        return y
