"""Encoders of GGUF files: BERT, and what makes one vector of a sentence."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from q4_lm.models.architecture import Architecture
from q4_lm.models.config import TransformerConfig
from q4_lm.models.gguf_names import names_of

if TYPE_CHECKING:
    from q4_lm.models.metadata import Metadata
    from q4core import Checkpoint

__all__ = ["BERT", "read_pooling"]

_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}


def _config(_: Checkpoint, metadata: Metadata) -> TransformerConfig:
    """Return the config of a file.

    Raises:
        CheckpointError: A value is missing, not legal, or asks for what is not computed here.
    """
    if metadata.flag("bert.attention.causal", default=False):
        metadata.fail("bert.attention.causal", "false", value=True)
    metadata.pass_over("bert.pooling_type")
    hidden, heads = (metadata.integer(f"bert.{name}") for name in ("embedding_length", "attention.head_count"))
    if hidden % heads:
        metadata.fail("bert.attention.head_count", f"a divisor of the {hidden} features", heads)
    config = TransformerConfig(
        hidden_size=hidden,
        intermediate_size=metadata.integer("bert.feed_forward_length"),
        num_hidden_layers=metadata.integer("bert.block_count", high=10_000),
        num_attention_heads=heads,
        vocab_size=len(metadata.items("tokenizer.ggml.tokens", str)),
        max_position_embeddings=metadata.integer("bert.context_length"),
        norm_eps=metadata.number("bert.attention.layer_norm_epsilon", above=0),
        type_vocab_size=metadata.integer("tokenizer.ggml.token_type_count", default=2),
        causal=False,
        hidden_act="gelu",
        gated=False,
        norm="layer",
        norm_position="post",
        positions="learned",
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    )
    metadata.refuse_unread("bert.", idle={"vocab_size"})
    return config


def read_pooling(metadata: Metadata) -> str:
    """Return how a sentence's features become one vector.

    Raises:
        CheckpointError: The header says none, or one that is not computed here.
    """
    number = metadata.integer("bert.pooling_type", low=0, default=1)
    if number not in _POOLINGS:
        known = ", ".join(f"{key} ({name})" for key, name in _POOLINGS.items())
        metadata.fail("bert.pooling_type", f"one of {known}", number)
    return _POOLINGS[number]


BERT = Architecture("bert", _config, functools.partial(names_of, kind="bert"))
