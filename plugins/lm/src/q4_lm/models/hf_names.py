"""Names of a model's parts, those of Hugging Face and ours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from q4_lm.models.config import TransformerConfig

__all__ = ["from_hf_name", "fused_parts", "to_hf_name"]

_BERT = (
    ("embeddings.word_embeddings", "embed_tokens"),
    ("embeddings.position_embeddings", "embed_positions"),
    ("embeddings.token_type_embeddings", "embed_types"),
    ("embeddings.LayerNorm", "embed_norm"),
    ("encoder.layer", "layers"),
    ("attention.self.query", "self_attn.q_proj"),
    ("attention.self.key", "self_attn.k_proj"),
    ("attention.self.value", "self_attn.v_proj"),
    ("attention.output.dense", "self_attn.o_proj"),
    ("attention.output.LayerNorm", "post_attention_layernorm"),
    ("intermediate.dense", "mlp.up_proj"),
    ("output.dense", "mlp.down_proj"),
    ("output.LayerNorm", "post_feedforward_layernorm"),
)
_NOMIC = (_BERT[0], _BERT[2], _BERT[3], ("post_mlp_layernorm", "post_feedforward_layernorm"))
_NOMIC_BEFORE = (
    ("emb_ln", "embed_norm"),
    ("encoder.layers", "layers"),
    ("attn.Wqkv", "self_attn.qkv_proj"),
    ("attn.out_proj", "self_attn.o_proj"),
    ("norm1", "post_attention_layernorm"),
    ("norm2", "post_feedforward_layernorm"),
    ("mlp.fc11", "mlp.up_proj"),
    ("mlp.fc12", "mlp.gate_proj"),
    ("mlp.fc2", "mlp.down_proj"),
)
"""Names of its authors' code, which transformers renames."""
_MODERN = (
    ("embeddings.tok_embeddings", "embed_tokens"),
    ("embeddings.norm", "embed_norm"),
    ("attn_norm", "input_layernorm"),
    ("attn.Wqkv", "self_attn.qkv_proj"),
    ("attn.Wo", "self_attn.o_proj"),
    ("mlp_norm", "pre_feedforward_layernorm"),
    ("mlp.Wi", "mlp.gate_up_proj"),
    ("mlp.Wo", "mlp.down_proj"),
    ("final_norm", "norm"),
)
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_PREFIX = re.compile(
    r"^(?:model|bert|roberta|nomic_bert|model\.language_model|language_model\.model)\."
    r"(?=emb|layers|norm|encoder|final_norm|pooler)"
)


def _names_of(config: TransformerConfig) -> tuple[tuple[str, str], ...]:
    """Return an encoder's names of parts, theirs and ours."""
    if config.norm_position == "pre":
        return _MODERN
    return _NOMIC if config.positions == "rotary" else _BERT


def from_hf_name(name: str, config: TransformerConfig) -> str:
    """Return what a tensor of a Hugging Face checkpoint is called here."""
    name = _PREFIX.sub("", name)
    if not config.causal:
        for theirs, ours in (*_names_of(config), *(_NOMIC_BEFORE if _names_of(config) is _NOMIC else ())):
            name = re.sub(rf"(^|\.){re.escape(theirs)}\.", rf"\1{ours}.", name)
        return name
    if config.num_experts:
        name = re.sub(r"\.(?:block_sparse_moe|mlp)\.gate\.", ".mlp.router.", name)
        name = re.sub(
            r"\.block_sparse_moe\.(experts\.\d+)\.(w\d)", lambda hit: f".mlp.{hit[1]}.{_MIXTRAL[hit[2]]}", name
        )
    if config.norm_position == "pre":  # there, this one precedes the feed-forward part
        return name.replace(".post_attention_layernorm.", ".pre_feedforward_layernorm.")
    return name


def to_hf_name(name: str, config: TransformerConfig) -> str:
    """Return what a parameter of ours is called in a Hugging Face checkpoint."""
    if not config.causal:
        for theirs, ours in reversed(_names_of(config)):
            name = re.sub(rf"(^|\.){re.escape(ours)}\.", rf"\1{theirs}.", name)
        return name
    if config.norm_position == "pre":
        name = name.replace(".pre_feedforward_layernorm.", ".post_attention_layernorm.")
    return name if name.startswith("lm_head.") else f"model.{name}"


def fused_parts(name: str, config: TransformerConfig) -> dict[str, int]:
    """Return the parts whose rows a fused matrix holds, in order, with their numbers; of another one itself alone.

    Args:
        name: A module's name, as here.
        config: The model's.
    """
    wide, narrow = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    head, _, last = name.rpartition(".")
    parts = {
        "qkv_proj": {"q_proj": wide, "k_proj": narrow, "v_proj": narrow},  # Phi-3
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }.get(last)
    return {name: 0} if parts is None else {f"{head}.{part}": rows for part, rows in parts.items()}
