"""GGUF files of each family, written as llama.cpp's converter writes them: the logits of transformers' own models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

import q4_transformers
import q4core as q4
from q4_lm import load_model
from q4_lm.exchange.gguf_to_hf import to_hf_folder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.peer

EXACT = q4.SessionConfig(device="cpu", activation_precision="exact")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
BASE = {"rope_theta": 10_000.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama-3": ("Llama", "llama", {"rope_parameters": {**BASE, "rope_type": "llama3", **LLAMA3}}),
    "mistral": ("Mistral", "llama", {"sliding_window": 7}),
    "qwen2": ("Qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", "qwen2", {"rope_parameters": {**BASE, **YARN}}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 32}),
    "gemma3": ("Gemma3Text", "gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5}),
    "phi3": ("Phi3", "phi3", {"rope_parameters": {**BASE, "rope_type": "default", "partial_rotary_factor": 0.75}}),
    "phi3-long": (
        "Phi3",
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {**BASE, "rope_type": "longrope", **LONG},
            "sliding_window": 30,
        },
    ),
    "smollm3": ("SmolLM3", "smollm3", {}),
    "gemma2": (
        "Gemma2",
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "qwen3moe": (
        "Qwen3Moe",
        "qwen3moe",
        {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"norm_topk_prob": True},
    ),
    "mixtral": ("Mixtral", "llama", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-apart": ("Mixtral", "llama", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", "olmo2", {}),
    "olmo3": ("Olmo3", "olmo2", {"sliding_window": 5}),
    "granite": (
        "Granite",
        "granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "logits_scaling": 8.0,
        },
    ),
    "gpt-oss": (
        "GptOss",
        "gpt-oss",
        {"head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7}
        | {"rope_parameters": {**BASE, **YARN, "truncate": False}},
    ),
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn": "attn_sinks",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OTHERS = {
    **dict.fromkeys(("gemma2", "gemma3", "olmo2"), GEMMA),
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def make(name: str) -> Any:
    """Return a random model of transformers."""
    torch.manual_seed(0)
    kind, _, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    config._attn_implementation = "eager"  # transformers' own way; the others leave out capped scores
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(3)
            parameter.copy_(parameter.half())  # such that files of float16 hold the same
    return model


def their_name(name: str, arch: str) -> str:
    """Return what llama.cpp calls a tensor of transformers'."""
    module, _, leaf = name.rpartition(".")
    if module in WHOLE:
        return f"{WHOLE[module]}.{leaf}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{({**PARTS, **OTHERS.get(arch, {})})[part]}.{'weight' if leaf == 'sinks' else leaf}"


def stored_parts(key: str, tensor: torch.Tensor, arch: str) -> list[tuple[str, torch.Tensor]]:
    """Return the file's tensors of one of transformers', as views of it: the experts' layers are stored apart."""
    if ".experts." not in key:
        return [(their_name(key, arch), tensor)]
    layer, leaf = key.split(".")[2], "bias" if key.endswith("_bias") else "weight"
    if arch == "gpt-oss":  # its columns are the outputs, those of gate and up by turns
        turned = tensor if leaf == "bias" else tensor.transpose(1, 2)
        both = (turned[:, ::2], turned[:, 1::2])
    else:
        turned, both = tensor, tensor.chunk(2, 1)
    found = [("down", turned)] if ".down_proj" in key else [*zip(("gate", "up"), both, strict=True)]
    return [(f"blk.{layer}.ffn_{part}_exps.{leaf}", view) for part, view in found]


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return q or k rows as the converter orders those of a Llama."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def write_options(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    """Write what some kinds alone have."""
    if count := getattr(config, "num_local_experts", 0):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    """Write the metadata as the converter does."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    write_options(writer, config, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if arch in {"qwen3", "qwen3moe", "gemma2", "gemma3", "gpt-oss"}:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None) or arch == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    original = rope.get("original_max_position_embeddings", 0)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(original)
    if rope["rope_type"] == "longrope":
        longer = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longer) / math.log(original)))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def write(path: Path, name: str, model: Any, kind: Type) -> None:
    """Write a model as the converter does; matrices in one type, whose numbers the model then has as well."""
    arch, config = MODELS[name][1], model.config
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, config, arch)
    if name == "llama-3":  # transformers' own frequencies say by what the plain ones are divided
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
        order = heads if arch in {"llama", "smollm3", "granite"} else None
        parts = stored_parts(key, tensor, arch)
        if name == "mixtral-apart" and "_exps" in parts[0][0]:  # as older files have them
            named = [(place.replace("_exps", "{}"), part) for place, part in parts]
            parts = [(place.format(f".{number}"), one) for place, part in named for number, one in enumerate(part)]
        for place, part in parts:
            stored = part if order is None else permuted(part, order)
            if arch.startswith("gemma") and key.endswith("norm.weight"):
                stored = part + 1
            to = kind if part.dim() > 1 and place.endswith(".weight") and "_inp" not in place else Type.F32
            packed = gguf.quantize(stored.contiguous().numpy().astype(np.float32), to)
            writer.add_tensor(place, packed, raw_dtype=to)
            if to is not Type.F32:
                held = torch.from_numpy(np.array(gguf.dequantize(packed, to)))
                if order is not None:
                    held = held.reshape(order, -1, 2, held.shape[1]).transpose(1, 2).reshape(held.shape)
                part.copy_(held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q4_0, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, kind: Type, tmp_path: Path) -> None:
    """Logits are those of transformers' model over the same numbers, at once and through a cache."""
    theirs = make(name)
    write(tmp_path / "model.gguf", name, theirs, kind)
    tokens = torch.randint(0, 96, (2, 40))
    with torch.inference_mode(), q4.Session(EXACT) as session:
        expected = theirs(tokens).logits
        ours: Any = load_model(tmp_path / "model.gguf", session)
        assert bool(session.layers()) == (kind in {Type.Q4_0, Type.Q8_0})
        limit = 1e-5 if kind in {Type.Q4_0, Type.Q8_0} else 2e-6

        def error(found: torch.Tensor) -> float:
            return float((found - expected).abs().max() / expected.abs().max())

        assert error(ours(tokens)) < limit
        if name != "phi3-long":  # a cache keeps keys that were turned for a short sequence
            cache = ours.make_cache(40, 2)
            assert error(torch.cat([ours(piece, cache) for piece in tokens.split([11, 1, 28], 1)], 1)) < limit


@pytest.mark.parametrize("name", MODELS)
def test_folders(name: str, tmp_path: Path) -> None:
    """A file becomes a folder whose config and tensors transformers' class takes, or is refused for its experts."""
    theirs = make(name)
    write(tmp_path / "model.gguf", name, theirs, Type.Q8_0)
    with q4.open(tmp_path / "model.gguf") as checkpoint:
        if name.startswith(("mixtral", "qwen3moe", "gpt-oss")):
            with pytest.raises(q4.CheckpointError, match="without experts"):
                to_hf_folder(checkpoint)
            return
        folder = to_hf_folder(checkpoint)
        state = {key: folder.dense[key].float() for key in folder.dense}
        state |= {f"{key}.weight": q4.dequantize(folder.weights[key], torch.float32) for key in folder.weights}
    config = transformers.AutoConfig.for_model(**folder.config)
    config._attn_implementation = "eager"
    ours = getattr(transformers, folder.config["architectures"][0])(config).float().eval()
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    ours.tie_weights()
    tokens = torch.randint(0, 96, (2, 40))
    with torch.inference_mode():
        found, expected = ours(tokens).logits, theirs(tokens).logits
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-6


def test_one_part_of_a_split_model(tmp_path: Path) -> None:
    """transformers' loading by this package refuses one part of a split file, as every other opening does."""
    path = tmp_path / "model-00002-of-00003.gguf"
    write(path, "qwen2", make("qwen2"), Type.Q8_0)
    with pytest.raises(q4.CheckpointError, match=r"part 2 of 3.*llama-gguf-split --merge"):
        q4_transformers.load(path)
