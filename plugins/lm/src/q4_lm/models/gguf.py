"""Decoders from GGUF files: the metadata's sizes, and the file's names of the parts.

Reference:
    Metadata keys and tensor names of the GGUF specification; what a kind leaves unsaid (which blocks slide, or turn
    nothing) is what llama.cpp computes for it.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import torch

from q4_lm.models.architecture import Architecture
from q4_lm.models.config import TransformerConfig
from q4_lm.models.hf_names import fused_parts
from q4_lm.models.load import Names
from q4_nn.blocks.rotary import RopeScaling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_lm.models.metadata import Metadata
    from q4_lm.models.transformer import TransformerDecoder
    from q4core import Checkpoint

__all__ = ["ARCHITECTURES"]

_KINDS = ("llama", "gemma3", "phi3", "qwen2", "qwen3", "smollm3")
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_FACTORS, _SHORT, _LONG = (f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long"))
_IDLE = frozenset(
    {
        "attention.layer_norm_epsilon",  # of norms that these kinds do not have
        "pooling_type",  # of embeddings
        "rope.scaling.finetuned",
        "tensor_data_layout",
        *(f"expert_{name}" for name in ("chunk_feed_forward_length", "feed_forward_length", "gating_func")),
        *(f"expert_{name}" for name in ("group_count", "group_scale", "group_used_count", "shared_count")),
        *(f"expert_{name}" for name in ("shared_feed_forward_length", "used_count", "weights_norm", "weights_scale")),
        *("experts_per_group", "interleave_moe_layer_step", "leading_dense_block_count", "moe_every_n_layers"),
        *("moe_latent_size", "router_logit_softcapping"),  # of experts, which are refused
    }
)
"""Keys that change nothing that is computed."""
_UNSUPPORTED = ("expert_count", "attn_logit_softcapping", "final_logit_softcapping")
_PLAIN = {
    **dict.fromkeys(_UNSUPPORTED, 0.0),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "nextn_predict_layers"), 0.0),
    **dict.fromkeys(("attention.shared_kv_layers", "embedding_length_per_layer_input", "n_deepstack_layers"), 0.0),
    **dict.fromkeys(("logit_scale", "residual_scale"), 1.0),
}
"""Options that none of these kinds computes, with the number at which each changes nothing."""


def _renamed(name: str, parts: dict[str, str], whole: dict[str, str], theirs: str, ours: str) -> str:
    """Return a name with the file's words instead of ours, or the other way round."""
    found = re.fullmatch(rf"{theirs}\.(\d+)\.(.+?)(\.weight|\.bias)?", name)
    if found is not None:
        return f"{ours}.{found[1]}.{parts.get(found[2], found[2])}{found[3] or ''}"
    head, dot, leaf = name.partition(".")
    return f"{whole.get(head, head)}{dot}{leaf}"


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
        intermediate_size=metadata.integer(key("feed_forward_length")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        max_position_embeddings=context,
        norm_eps=metadata.number(key("attention.layer_norm_rms_epsilon"), above=0),
        rope_dim=turned,
        rope_theta=metadata.number(key("rope.freq_base"), above=0, default=10000.0),
        rope_scaling=_rope_scaling(checkpoint, metadata, key("rope.scaling"), context, turned),
        rope_interleaved=kind in {"llama", "smollm3"},  # whose q and k rows the converter permutes
        attention_bias=kind == "qwen2" or "attn_q.bias" in found,
        attention_out_bias="attn_output.bias" in found,
        mlp_bias="ffn_down.bias" in found,
        qk_norm=kind in {"gemma3", "qwen3"},
        tie_word_embeddings="output" not in found,  # which is how all of these kinds say it
        **_options(metadata, prefix, kind),
    )
    metadata.refuse_unread(f"{prefix}.", idle=_IDLE)
    return config


def _options(metadata: Metadata, prefix: str, kind: str) -> dict[str, Any]:
    """Return what a kind does beyond a Llama; refuse what none of them does."""
    _require(metadata, {f"{prefix}.{name}": number for name, number in _PLAIN.items()})
    for name, plain in (("attention.causal", True), ("use_parallel_residual", False)):
        if metadata.flag(f"{prefix}.{name}", default=plain) is not plain:
            metadata.fail(f"{prefix}.{name}", str(plain).lower(), not plain)
    layers, hidden, context = (
        metadata.integer(f"{prefix}.{name}") for name in ("block_count", "embedding_length", "context_length")
    )
    window = metadata.integer(f"{prefix}.attention.sliding_window", low=0, default=0)
    options: dict[str, Any] = {}
    every = layers + 1
    if kind == "gemma3":  # its norms are stored with their 1 added: plain ones
        every = metadata.integer(f"{prefix}.attention.sliding_window_pattern", default=6)
        options = {"norm_position": "both", "hidden_act": "gelu_tanh", "embedding_scale": hidden**0.5}
        if layers == 62:  # noqa: PLR2004  # of 27B alone
            options["attention_scale"] = (hidden / metadata.integer(f"{prefix}.attention.head_count")) ** -0.5
        options["local_rope_theta"] = metadata.number(f"{prefix}.rope.freq_base_swa", above=0, default=10_000.0)
    if kind == "smollm3":
        options["no_rope_layers"] = range(3, layers, 4)
    if kind == "gemma3" or not 0 < window < context:
        metadata.pass_over(*(f"{prefix}.{name}" for name in ("attention.sliding_window_pattern", "rope.freq_base_swa")))
    if window and (window < context or kind == "gemma3"):  # whose sliding blocks have a base of their own
        sliding = [layer for layer in range(layers) if (layer + 1) % every]
        options |= {"sliding_window": window, "sliding_layers": sliding}
    return options


def _rope_scaling(checkpoint: Checkpoint, metadata: Metadata, prefix: str, context: int, turned: int) -> RopeScaling:
    kind = metadata.text(f"{prefix}.type", default=None)
    is_long = kind == "longrope" or _LONG in checkpoint.dense or _SHORT in checkpoint.dense
    if is_long and kind not in {None, "none", "longrope"}:
        metadata.fail(f"{prefix}.type", "'longrope', as there are factors for it", kind)
    if kind not in {None, "none", "linear", "yarn", "longrope"}:
        metadata.fail(f"{prefix}.type", "'none', 'linear', 'yarn' or 'longrope'", kind)
    original = metadata.integer(f"{prefix}.original_context_length", default=context)
    amplitude = metadata.number(f"{prefix}.attn_factor", above=0, default=1.0)
    if amplitude != 1 and not is_long:
        metadata.fail(f"{prefix}.attn_factor", "1, but for LongRoPE", amplitude)
    _require(metadata, {f"{prefix}.yarn_attn_factor": 1.0})
    newer, older = f"{prefix}.factor", f"{prefix.removesuffix('scaling')}scale_linear"
    if kind == "yarn":
        return _yarn(metadata, prefix, _factor(metadata, newer, older), original)
    metadata.pass_over(*(f"{prefix}.yarn_{name}" for name in ("beta_fast", "beta_slow", "log_multiplier")))
    if kind == "none":
        metadata.pass_over(newer, older, f"{prefix}.yarn_ext_factor")
    else:  # an ext_factor makes llama.cpp compute YaRN for every type
        _require(metadata, {f"{prefix}.yarn_ext_factor": 0.0})
    if is_long:
        if kind != "none":
            _require(metadata, {newer: 1.0, older: 1.0})
        long, short = (_factors(checkpoint, metadata, name, turned) for name in (_LONG, _SHORT))
        facts = {"factor": context / original, "original_context": original, "attention_factor": amplitude}
        return RopeScaling(kind="longrope", short_factor=(*short.tolist(),), long_factor=(*long.tolist(),), **facts)
    factor = 1.0 if kind == "none" else _factor(metadata, newer, older)
    return RopeScaling() if factor == 1 else RopeScaling(kind="linear", factor=factor)


def _factor(metadata: Metadata, newer: str, older: str) -> float:
    found: float = metadata.number(newer, above=0, default=metadata.number(older, above=0, default=1.0))
    return found


def _yarn(metadata: Metadata, prefix: str, factor: float, original: int) -> RopeScaling:
    _require(metadata, {f"{prefix}.yarn_log_multiplier": 0.0, f"{prefix}.yarn_ext_factor": 1.0})
    beta = {
        f"beta_{name}": metadata.number(f"{prefix}.yarn_beta_{name}", above=0, default=default)
        for name, default in (("fast", 32.0), ("slow", 1.0))
    }
    return RopeScaling(kind="yarn", factor=factor, original_context=original, **beta)


def _require(metadata: Metadata, plain: Mapping[str, float]) -> None:
    """Refuse each key that says another number than the one at which it changes nothing."""
    for key, number in plain.items():
        if (value := metadata.number(key, above=-1e9, default=number)) != number:
            is_known = key.rpartition(".")[2] in _UNSUPPORTED
            why = "experts and capped logits are not supported" if is_known else "nothing else is computed here"
            metadata.fail(key, f"{number:g}, as {why}", value)


def _factors(checkpoint: Checkpoint, metadata: Metadata, name: str, turned: int) -> torch.Tensor:
    """Return divisors of the rotary frequencies: float32 [turned / 2]."""
    if name not in checkpoint.dense:
        metadata.fail_tensor(name, "present and dense", "none")
    factors = checkpoint.dense[name]
    if list(factors.shape) != [turned // 2]:
        metadata.fail_tensor(name, f"of shape {[turned // 2]}, which the metadata asks for", list(factors.shape))
    return factors.to(torch.float32, copy=True)


def _names(config: TransformerConfig, kind: str) -> Names:
    parts = {**_PARTS, "ffn_up": "mlp.gate_up_proj"} if kind == "phi3" else _PARTS
    back, whole = ({value: key for key, value in table.items()} for table in (parts, _WHOLE))
    return Names(
        ours=functools.partial(_renamed, parts=parts, whole=_WHOLE, theirs="blk", ours="layers"),
        theirs=functools.partial(_renamed, parts=back, whole=whole, theirs="layers", ours="blk"),
        fused=functools.partial(fused_parts, config=config),
        ignored={"llama": (_FACTORS, _SHORT, _LONG), "phi3": (_SHORT, _LONG)}.get(kind, ()),
    )


def _finish(decoder: TransformerDecoder, checkpoint: Checkpoint, metadata: Metadata) -> None:
    """Load the divisors of the rotary frequencies, where the file has them (Llama 3)."""
    if _FACTORS in checkpoint.dense:
        decoder.divide_frequencies(_factors(checkpoint, metadata, _FACTORS, decoder.config.rope_dim))


ARCHITECTURES = tuple(
    Architecture(kind, functools.partial(_config, kind=kind), functools.partial(_names, kind=kind), _finish)
    for kind in _KINDS
)
