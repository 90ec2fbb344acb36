"""Decoders from GGUF files: the metadata's sizes, and what the file calls the parts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_nn.blocks.rotary import RopeScaling
from q4_nn.models.architecture import Architecture
from q4_nn.models.config import TransformerConfig
from q4_nn.models.load import Names

if TYPE_CHECKING:
    from q4_nn.models.metadata import Metadata
    from q4_nn.models.transformer import TransformerDecoder
    from q4core import Checkpoint

__all__ = ["ARCHITECTURES", "config_from_gguf"]

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_FACTORS = "rope_freqs.weight"


def _renamed(name: str, parts: dict[str, str], whole: dict[str, str], theirs: str, ours: str) -> str:
    """Return a name with the file's words in the place of ours, or the other way round."""
    found = re.fullmatch(rf"{theirs}\.(\d+)\.(.+?)(\.weight|\.bias)?", name)
    if found is not None:
        return f"{ours}.{found[1]}.{parts.get(found[2], found[2])}{found[3] or ''}"
    head, dot, leaf = name.partition(".")
    return f"{whole.get(head, head)}{dot}{leaf}"


def _ours(name: str) -> str:
    return _renamed(name, _PARTS, _WHOLE, "blk", "layers")


def _theirs(name: str) -> str:
    parts, whole = ({value: key for key, value in table.items()} for table in (_PARTS, _WHOLE))
    return _renamed(name, parts, whole, "layers", "blk")


def config_from_gguf(metadata: Metadata, *, tied: bool = False) -> TransformerConfig:
    """Return the config of a Llama-family GGUF file.

    Args:
        metadata: The file's.
        tied: Whether the head is the embedding, which only the file's tensors tell.

    Raises:
        CheckpointError: A value is missing, not legal, or asks for what is not computed here.

    Reference:
        Metadata keys of the GGUF specification.
    """
    prefix = metadata.text("general.architecture", default="llama")

    def key(name: str) -> str:
        return f"{prefix}.{name}"

    hidden = metadata.integer(key("embedding_length"))
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
    experts = metadata.integer(key("expert_count"), low=0, default=0)
    if experts:
        metadata.fail(key("expert_count"), "0 (no mixture of experts is served)", experts)
    context = metadata.integer(key("context_length"))
    # Inside its window a sliding-window model is an ordinary one; beyond it nothing is promised.
    context = min(context, metadata.integer(key("attention.sliding_window"), low=1, default=context))
    tokens = len(metadata.items("tokenizer.ggml.tokens", str)) if "tokenizer.ggml.tokens" in metadata else None
    vocabulary = metadata.integer(key("vocab_size"), default=tokens)
    if vocabulary is None:
        metadata.fail(key("vocab_size"), "present")
    return TransformerConfig(
        num_hidden_layers=metadata.integer(key("block_count"), high=10_000),
        hidden_size=hidden,
        intermediate_size=metadata.integer(key("feed_forward_length")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        max_position_embeddings=context,
        norm_eps=metadata.number(key("attention.layer_norm_rms_epsilon"), above=0),
        rope_dim=turned,
        rope_theta=metadata.number(key("rope.freq_base"), above=0, default=10000.0),
        rope_scaling=_rope_scaling(metadata, prefix),
        rope_interleaved=True,
        tie_word_embeddings=tied,
    )


def _rope_scaling(metadata: Metadata, prefix: str) -> RopeScaling:
    kind = metadata.text(f"{prefix}.rope.scaling.type", default=None)
    if kind is None:
        factor = metadata.number(f"{prefix}.rope.scale_linear", above=0, default=1.0)
        return RopeScaling() if factor == 1 else RopeScaling(kind="linear", factor=factor)
    if kind == "none":
        return RopeScaling()
    if kind != "linear":
        metadata.fail(f"{prefix}.rope.scaling.type", "'none' or 'linear'", kind)
    return RopeScaling(kind="linear", factor=metadata.number(f"{prefix}.rope.scaling.factor", above=0))


def _config(checkpoint: Checkpoint, metadata: Metadata) -> TransformerConfig:
    has_head = "output.weight" in checkpoint.dense or "output" in checkpoint
    unread = any(problem.key in {"output", "output.weight"} for problem in checkpoint.schema.unsupported)
    config = config_from_gguf(metadata, tied=not (has_head or unread))

    def has(name: str) -> bool:
        return f"blk.0.{name}.bias" in checkpoint.dense

    biases: dict[str, Any] = {"attention_bias": has("attn_q"), "attention_out_bias": has("attn_output")}
    return attrs.evolve(config, **biases, mlp_bias=has("ffn_down"))


def _names(_: TransformerConfig) -> Names:
    return Names(ours=_ours, theirs=_theirs, ignored=(_FACTORS,))


def _finish(decoder: TransformerDecoder, checkpoint: Checkpoint, metadata: Metadata) -> None:
    """Take the divisors of the rotary frequencies, where the file has them (Llama 3)."""
    if _FACTORS not in checkpoint.dense:
        return
    factors = checkpoint.dense[_FACTORS]
    wanted = [decoder.config.rope_dim // 2]
    if list(factors.shape) != wanted:
        metadata.fail_tensor(_FACTORS, f"of shape {wanted}, which the metadata asks for", list(factors.shape))
    for block in decoder.layers:
        rotary = block.self_attn.rotary  # type: ignore[union-attr]  # a TransformerBlock
        rotary.factors = factors.to(torch.float32, copy=True)  # type: ignore[union-attr]  # as above


ARCHITECTURES = (Architecture("llama", _config, _names, _finish),)
