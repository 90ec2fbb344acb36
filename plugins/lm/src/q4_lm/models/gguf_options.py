"""Options of a GGUF header beyond a Llama's, by the architecture; what is not computed is refused by its key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_lm.models.gguf_rope import UNSUPPORTED, require

if TYPE_CHECKING:
    from q4_lm.models.metadata import Metadata

__all__ = ["read_options"]

_READ = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "granite": ("logit_scale", "residual_scale"),
    **dict.fromkeys(("llama", "qwen3moe", "gpt-oss"), ("expert_count",)),
}
"""Options that a kind computes, of those that others do not."""
_SLIDING = {"gemma2": 2, "gpt-oss": 2, "gemma3": 6, "olmo2": 4}
"""Kinds of which all blocks slide but each n-th."""
_PLAIN = {
    **dict.fromkeys(UNSUPPORTED, 0.0),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "nextn_predict_layers"), 0.0),
    **dict.fromkeys(("attention.shared_kv_layers", "embedding_length_per_layer_input", "n_deepstack_layers"), 0.0),
    **dict.fromkeys(("logit_scale", "residual_scale"), 1.0),
}
"""Options that none of these kinds computes, with the number at which each changes nothing."""


def _experts(metadata: Metadata, prefix: str, kind: str) -> dict[str, Any]:
    """Return the options of experts; refuse what is not computed of them."""
    count = metadata.integer(f"{prefix}.expert_count", low=0, default=0)
    if not count:
        if kind != "llama":
            metadata.fail(f"{prefix}.expert_count", "a positive whole number", count)
        return {}
    require(metadata, {f"{prefix}.expert_shared_count": 0.0, f"{prefix}.expert_weights_scale": 1.0})
    if not metadata.flag(f"{prefix}.expert_weights_norm", default=True):
        metadata.fail(f"{prefix}.expert_weights_norm", "true", value=False)
    gating = metadata.integer(f"{prefix}.expert_gating_func", default=1)
    if gating not in {1, 3}:  # softmax of all, or of the chosen: the same, once it is divided by its sum
        metadata.fail(f"{prefix}.expert_gating_func", "1 or 3, a softmax", gating)
    chosen = metadata.integer(f"{prefix}.expert_used_count", high=count)
    return {"num_experts": count, "num_experts_per_tok": chosen}


def read_options(metadata: Metadata, prefix: str, kind: str) -> dict[str, Any]:
    """Return what a kind does beyond a Llama; refuse what none of them does."""
    read = _READ.get(kind, ())
    require(metadata, {f"{prefix}.{name}": number for name, number in _PLAIN.items() if name not in read})
    for name, plain in (("attention.causal", True), ("use_parallel_residual", False)):
        if metadata.flag(f"{prefix}.{name}", default=plain) is not plain:
            metadata.fail(f"{prefix}.{name}", str(plain).lower(), not plain)
    options: dict[str, Any] = _experts(metadata, prefix, kind) if "expert_count" in read else {}
    layers = metadata.integer(f"{prefix}.block_count")
    if kind in {"gemma2", "gemma3"}:
        options |= _gemma(metadata, prefix, kind, layers)
    elif kind == "granite":
        options |= _scales(metadata, prefix)
    elif kind == "gpt-oss":
        options |= {"attention_sinks": True, "hidden_act": "clamped_swiglu"}
    elif kind == "olmo2":
        options |= {"norm_position": "after", "qk_norm_heads": False}
    elif kind == "smollm3":
        options["no_rope_layers"] = range(3, layers, 4)
    return options | _windows(metadata, prefix, kind)


def _gemma(metadata: Metadata, prefix: str, kind: str, layers: int) -> dict[str, Any]:
    """Return Gemma's options; its norms are stored with their 1 added: plain ones."""
    hidden = metadata.integer(f"{prefix}.embedding_length")
    options = {"norm_position": "both", "hidden_act": "gelu_tanh", "embedding_scale": hidden**0.5}
    if (kind, layers) in {("gemma2", 46), ("gemma3", 62)}:  # of 27B alone
        options["attention_scale"] = (hidden / metadata.integer(f"{prefix}.attention.head_count")) ** -0.5
    if kind == "gemma2":
        for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            options[name] = metadata.number(f"{prefix}.{name}", above=-1e-9, default=default) or None
    return options


def _scales(metadata: Metadata, prefix: str) -> dict[str, Any]:
    """Return Granite's factors."""
    if not metadata.flag(f"{prefix}.rope.scaling.finetuned", default=True):
        metadata.fail(f"{prefix}.rope.scaling.finetuned", "true, as every block turns", value=False)
    embedding, residual, logits, scores = (
        metadata.number(f"{prefix}.{name}", above=0, default=default)
        for name, default in (
            ("embedding_scale", 1.0),
            ("residual_scale", 1.0),
            ("logit_scale", 1.0),
            ("attention.scale", None),
        )
    )
    found = {"embedding_scale": embedding, "residual_scale": residual, "logit_scale": 1 / logits}
    return found | {"attention_scale": scores}


def _windows(metadata: Metadata, prefix: str, kind: str) -> dict[str, Any]:
    """Return which blocks slide, how far they see, and their own base."""
    layers, context = (metadata.integer(f"{prefix}.{name}") for name in ("block_count", "context_length"))
    of_base, of_pattern = f"{prefix}.rope.freq_base_swa", f"{prefix}.attention.sliding_window_pattern"
    default = {"gemma2": 4096, "gpt-oss": 128}.get(kind, 0)
    window = metadata.integer(f"{prefix}.attention.sliding_window", low=0, default=default)
    every, options = layers + 1, {}
    if kind in _SLIDING:
        every = metadata.integer(of_pattern, default=_SLIDING[kind])
    if kind == "gemma3":
        options = {"local_rope_theta": metadata.number(of_base, above=0, default=10_000.0)}
    if kind == "olmo2" and window:  # whose sliding blocks are not scaled
        base = metadata.number(f"{prefix}.rope.freq_base", above=0, default=10_000.0)
        options = {"local_rope_theta": metadata.number(of_base, above=0, default=base)}
    if not 0 < window < context:
        metadata.pass_over(of_base, of_pattern)
    if window and (window < context or options):
        sliding = [layer for layer in range(layers) if (layer + 1) % every]
        options |= {"sliding_window": window, "sliding_layers": sliding}
    return options
