"""Decoders from GGUF files: the metadata's sizes, and the file's names of the parts.

Reference:
    Metadata keys and tensor names of the GGUF specification; what a kind leaves unsaid (which blocks slide, or turn
    nothing) is what llama.cpp computes for it.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from q4_lm.models.architecture import Architecture
from q4_lm.models.config import TransformerConfig
from q4_lm.models.gguf_names import names_of
from q4_lm.models.gguf_options import read_options
from q4_lm.models.gguf_rope import FACTORS, read_factors, read_rope_scaling

if TYPE_CHECKING:
    from q4_lm.models.metadata import Metadata
    from q4_lm.models.transformer import TransformerDecoder
    from q4core import Checkpoint

__all__ = ["ARCHITECTURES"]

_KINDS = ("llama", "gemma2", "gemma3", "gpt-oss", "granite", "olmo2", "phi3", "qwen2", "qwen3", "qwen3moe", "smollm3")
_PERMUTED = frozenset({"llama", "smollm3", "granite"})
"""Kinds of whose q and k the converter permutes the rows, such that the members of a pair are neighbours."""
_IDLE = frozenset(
    {
        "attention.layer_norm_epsilon",  # of norms that these kinds do not have
        "pooling_type",  # of embeddings
        "rope.scaling.finetuned",
        "tensor_data_layout",
    }
)
"""Keys that change nothing that is computed."""
_OF_EXPERTS = frozenset(
    {
        *(f"expert_{name}" for name in ("chunk_feed_forward_length", "feed_forward_length", "gating_func")),
        *(f"expert_{name}" for name in ("group_count", "group_scale", "group_used_count", "shared_count")),
        *(f"expert_{name}" for name in ("shared_feed_forward_length", "used_count", "weights_norm", "weights_scale")),
        *("experts_per_group", "interleave_moe_layer_step", "leading_dense_block_count", "moe_every_n_layers"),
        *("moe_latent_size", "router_logit_softcapping"),
    }
)
"""Keys that change nothing where there are no experts."""


def _config(checkpoint: Checkpoint, metadata: Metadata, kind: str) -> TransformerConfig:
    """Return the config of a file.

    Raises:
        CheckpointError: A value is missing, not legal, or asks for what is not computed here.
    """
    prefix = metadata.text("general.architecture", default=kind)

    def key(name: str) -> str:
        return f"{prefix}.{name}"

    unread = (problem.key for problem in checkpoint.schema.unsupported)
    # Without their block's number: what one block has, all must have.
    found = {
        re.sub(r"^blk\.\d+\.", "", name.removesuffix(".weight")) for name in (*checkpoint, *checkpoint.dense, *unread)
    }
    hidden = metadata.integer(key("embedding_length"))
    layers = metadata.integer(key("block_count"), high=10_000)
    heads = metadata.integer(key("attention.head_count"))
    kv_heads = metadata.integer(key("attention.head_count_kv"), default=heads)
    if heads % kv_heads:
        metadata.fail(key("attention.head_count_kv"), f"a divisor of the {heads} heads", kv_heads)
    head_dim = metadata.integer(key("attention.key_length"), default=None)
    if head_dim is None:
        if hidden % heads:
            metadata.fail(key("attention.head_count"), f"a divisor of the {hidden} features", heads)
        head_dim = hidden // heads
    value_dim = metadata.integer(key("attention.value_length"), default=head_dim)
    if value_dim != head_dim:
        metadata.fail(key("attention.value_length"), f"{head_dim}, as many as a key has", value_dim)
    turned = metadata.integer(key("rope.dimension_count"), default=head_dim)
    if turned % 2 or turned > head_dim:
        metadata.fail(key("rope.dimension_count"), f"even and at most {head_dim}", turned)
    tokens = len(metadata.items("tokenizer.ggml.tokens", str)) if "tokenizer.ggml.tokens" in metadata else None
    vocabulary = metadata.integer(key("vocab_size"), default=tokens)
    if vocabulary is None:
        metadata.fail(key("vocab_size"), "present")
    context = metadata.integer(key("context_length"))
    config = TransformerConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=_inner_size(metadata, prefix, kind),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        max_position_embeddings=context,
        norm_eps=metadata.number(key("attention.layer_norm_rms_epsilon"), above=0),
        rope_dim=turned,
        rope_theta=metadata.number(key("rope.freq_base"), above=0, default=10000.0),
        rope_scaling=read_rope_scaling(checkpoint, metadata, key("rope.scaling"), context, turned),
        rope_interleaved=kind in _PERMUTED,
        attention_bias=kind in {"qwen2", "gpt-oss"} or "attn_q.bias" in found,
        attention_out_bias=kind == "gpt-oss" or "attn_output.bias" in found,
        mlp_bias=kind == "gpt-oss" or "ffn_down.bias" in found,
        qk_norm=kind in {"gemma3", "qwen3", "qwen3moe", "olmo2"},
        tie_word_embeddings="output" not in found,  # which is how all of these kinds say it
        **read_options(metadata, prefix, kind),
    )
    idle = _IDLE if config.num_experts else _IDLE | _OF_EXPERTS
    metadata.refuse_unread(f"{prefix}.", idle=idle - {"rope.scaling.finetuned"} if kind == "granite" else idle)
    return config


def _inner_size(metadata: Metadata, prefix: str, kind: str) -> int:
    """Return the features inside a feed-forward part, or inside an expert."""
    found: int = metadata.integer(f"{prefix}.feed_forward_length")
    if kind in {"qwen3moe", "gpt-oss"}:
        found = metadata.integer(f"{prefix}.expert_feed_forward_length", default=found)
    return found


def _finish(decoder: TransformerDecoder, checkpoint: Checkpoint, metadata: Metadata) -> None:
    """Load the divisors of the rotary frequencies, where the file has them (Llama 3)."""
    if FACTORS in checkpoint.dense:
        decoder.divide_frequencies(read_factors(checkpoint, metadata, FACTORS, decoder.config.rope_dim))


ARCHITECTURES = tuple(
    Architecture(kind, functools.partial(_config, kind=kind), functools.partial(names_of, kind=kind), _finish)
    for kind in _KINDS
)
