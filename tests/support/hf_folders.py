"""Random models as Hugging Face folders, one of each family of decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from q4_lm import build_transformer, config_from_hf
from q4_lm.models.hf_names import to_hf_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FAMILIES", "write_folder"]

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 2**-20,
}  # fmt: skip
_LONG_ROPE = {"type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 3.0] * 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-3": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "gemma2": {"model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    "phi3": {"model_type": "phi3"},
    "phi3-long": {"model_type": "phi3", "rope_scaling": _LONG_ROPE, "original_max_position_embeddings": 32},
    "smollm3": {"model_type": "smollm3"},
    "olmo2": {"model_type": "olmo2"},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0,
        "attention_multiplier": 0.125,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
}  # fmt: skip


def write_folder(folder: Path, given: dict[str, Any], *, is_dense: bool = False, **sizes: int) -> Path:
    """Write a random model as a folder, its matrices in int4 as compressed-tensors packs them."""
    facts = {**_SIZES, **given, **sizes}
    config = config_from_hf(facts)
    torch.manual_seed(11)
    model = build_transformer(config)
    weights: dict[str, q4.PackedWeight] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        theirs = to_hf_name(name, config)
        if config.tie_word_embeddings and name.startswith("lm_head"):
            continue
        values = tensor + 0.3 * torch.randn_like(tensor) if tensor.dim() == 1 else tensor * 2
        stem = theirs.removesuffix(".weight")
        is_packed = tensor.dim() == 2 and "proj" in stem and not is_dense
        if is_packed:
            weights[stem] = q4.quantize(values.half(), "int4", block_size=32, symmetric=True)
        else:
            dense[theirs] = values
    if given["model_type"] == "phi3":
        weights, dense = _fuse(weights, dense)
    q4.save_checkpoint(folder, weights, dialect="compressed-tensors-int4", dense=dense, config=facts)
    return folder


def _fuse(weights: dict[str, Any], dense: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts of Phi-3 whose rows one matrix holds, dense."""
    values = {**dense, **{f"{name}.weight": q4.dequantize(item, torch.float32) for name, item in weights.items()}}
    for layer in range(_SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for whole, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            values[f"{at}.{whole}.weight"] = torch.cat([values.pop(f"{at}.{part}.weight") for part in parts])
    packed = {}
    for name in [name for name in values if "proj" in name]:
        packed[name.removesuffix(".weight")] = q4.quantize(
            values.pop(name).half(), "int4", block_size=32, symmetric=True
        )
    return packed, values
