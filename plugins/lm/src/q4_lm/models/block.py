"""The layer type ``block``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_lm.models.config import TransformerConfig
from q4_lm.models.transformer import TransformerBlock
from q4_nn.layer_type import LayerExample, LayerType
from q4_nn.registry.builtin import tokens_shape

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BLOCK"]


def _block(  # noqa: PLR0913  # one argument per option
    hidden_size: int,
    num_heads: int,
    intermediate_size: int,
    *,
    num_kv_heads: int | None = None,
    causal: bool = True,
    activation: str = "silu",
    gated: bool = True,
    norm: str = "rms",
    norm_position: str = "pre",
    positions: str = "rotary",
    dropout: float = 0.0,
) -> nn.Module:
    config = TransformerConfig(
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads if num_kv_heads is None else num_kv_heads,
        intermediate_size=intermediate_size,
        causal=causal,
        hidden_act=activation,
        gated=gated,
        norm=norm,
        norm_position=norm_position,
        positions=positions,
        dropout=dropout,
    )
    return TransformerBlock(config)


BLOCK = LayerType(
    "block",
    _block,
    tokens_shape,
    "transformer block: attention, feed-forward, norms",
    (LayerExample((3, 8), {"hidden_size": 8, "num_heads": 2, "intermediate_size": 6}),),
)
