"""GGUF files of other families than Llama: the configs of their metadata, and their numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch

import q4core as q4
from q4_lm import LanguageModel, build_transformer, config_from_gguf, config_from_hf, config_to_hf, load_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXACT = q4.SessionConfig(device="cpu", activation_precision="exact")
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rms_norm_eps": 2**-20,  # which float32 holds
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 5,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 9},
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write(path: Path, arch: str, **changes: Any) -> Any:
    """Write a random decoder as a family's GGUF file, with a vocabulary of pieces, and return the decoder."""
    torch.manual_seed(0)
    facts = {**SIZES, **FAMILIES.get(arch, FAMILIES["qwen3"])}
    decoder: Any = build_transformer(config_from_hf(facts)).eval()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(40)])
    writer.add_block_count(6)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_rope_freq_base(facts.get("rope_theta", 1e4))
    writer.add_rope_dimension_count(int(32 * facts.get("partial_rotary_factor", 1)))
    if "sliding_window" in facts:
        writer.add_sliding_window(facts["sliding_window"])
    for key, value in changes.items():
        writer.add_float32(f"{arch}.{key}", value)
    state = dict(decoder.state_dict())
    del state["lm_head.weight"]
    for block in range(6 * (arch == "phi3")):
        at = f"layers.{block}."
        fused = [state.pop(f"{at}self_attn.{name}_proj.weight") for name in "qkv"]
        writer.add_tensor(f"blk.{block}.attn_qkv.weight", torch.cat(fused).numpy())
        fused = [state.pop(f"{at}mlp.{name}_proj.weight") for name in ("gate", "up")]
        writer.add_tensor(f"blk.{block}.ffn_up.weight", torch.cat(fused).numpy())
    for key, tensor in state.items():
        if "norm" in key:
            tensor.add_(0.2 * torch.randn_like(tensor))
        module, _, leaf = key.rpartition(".")
        _, layer, part = module.split(".", 2) if module.startswith("layers.") else ("", "", module)
        name = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(part) or f"blk.{layer}.{PARTS[part]}"
        is_shifted = arch == "gemma3" and "norm" in key
        writer.add_tensor(f"{name}.{leaf}", (tensor + 1 if is_shifted else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoder


@pytest.mark.parametrize("arch", FAMILIES)
def test_family(arch: str, tmp_path: Path) -> None:
    """A file gives the logits of the decoder that was written, though its vocabulary lacks scores: that says so."""
    expected = write(tmp_path / "model.gguf", arch)
    tokens = torch.randint(0, 40, (2, 20))
    with torch.no_grad(), q4.Session(EXACT) as session:
        found: Any = load_model(tmp_path / "model.gguf", session)
        logits = expected(tokens)
        assert float((found(tokens) - logits).abs().max() / logits.abs().max()) < 1e-6
    same = {name: value for name, value in found.config.to_dict().items() if name != "norm"}
    assert same == {name: value for name, value in expected.config.to_dict().items() if name in same}
    assert found.config.windows == {"qwen3": (None,) * 6, "gemma3": (5,) * 5 + (None,), "phi3": (9,) * 6}[arch]
    assert config_from_gguf(tmp_path / "model.gguf") == found.config
    with pytest.raises(q4.CheckpointError, match=r"tokenizer\.ggml"):
        LanguageModel.open(tmp_path / "model.gguf", EXACT)


def test_a_config_from_a_folder(tmp_path: Path) -> None:
    """A folder's config is that of its values, goes back to such, and is an error where there is none."""
    facts = {**SIZES, **FAMILIES["qwen3"]}
    (tmp_path / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    config = config_from_hf(tmp_path)
    assert config == config_from_hf(facts)
    assert config_from_hf(config_to_hf(config, "qwen3")) == config
    with pytest.raises(q4.CheckpointError, match=r"config\.json"):
        config_from_hf(tmp_path / "nothing")


def test_unknown_family(tmp_path: Path) -> None:
    """An unknown architecture is an error that names the supported ones."""
    write(tmp_path / "model.gguf", "deepseek2")
    with (
        q4.Session(EXACT) as session,
        pytest.raises(q4.CheckpointError, match="one of bert, gemma2, gemma3, gpt-oss"),
    ):
        load_model(tmp_path / "model.gguf", session)


@pytest.mark.parametrize("key", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_capped_logits(key: str, tmp_path: Path) -> None:
    """What is not computed is refused by the key that asks for it."""
    write(tmp_path / "model.gguf", "gemma3", **{key: 30.0})
    with (
        q4.Session(EXACT) as session,
        pytest.raises(q4.CheckpointError, match="capped logits are not supported") as caught,
    ):
        load_model(tmp_path / "model.gguf", session)
    assert caught.value.name == f"metadata 'gemma3.{key}'"


def hollow(source: Path, target: Path, *lost: str) -> Path:
    """Write a GGUF file again without some of its tensors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen3")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[0] if inner else None)
    for tensor in reader.tensors:
        if not tensor.name.startswith(lost):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    """A file that lacks tensors of its architecture is refused before anything is read; they are named."""
    write(tmp_path / "model.gguf", "qwen3")
    path = hollow(tmp_path / "model.gguf", tmp_path / "hollow.gguf", "blk.2.ffn", "output_norm")
    with q4.Session(EXACT) as session, pytest.raises(q4.CheckpointError) as caught:
        load_model(path, session)
    assert "5 missing: blk.2.ffn_norm.weight" in str(caught.value)
    assert "output_norm.weight" in str(caught.value)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("lost", ["blk.3.attn_k_norm", ("blk.0.attn_q_norm", "blk.0.attn_k_norm")])
def test_norms_that_a_kind_always_has(lost: str | tuple[str, ...], tmp_path: Path) -> None:
    """Whether queries and keys are normed the architecture says, not what the first block happens to have."""
    write(tmp_path / "model.gguf", "qwen3")
    path = hollow(tmp_path / "model.gguf", tmp_path / "hollow.gguf", *([lost] if isinstance(lost, str) else lost))
    with q4.Session(EXACT) as session, pytest.raises(q4.CheckpointError, match="missing: blk"):
        load_model(path, session)


@pytest.mark.parametrize("opened", [load_model, LanguageModel.open, config_from_gguf])
def test_one_part_of_a_split_model(opened: Callable[..., Any], tmp_path: Path) -> None:
    """One part of a split file is refused however it is opened, by what to do with it."""
    write(tmp_path / "model-00001-of-00002.gguf", "qwen3")
    with pytest.raises(q4.CheckpointError, match=r"part 1 of 2.*llama-gguf-split --merge"):
        opened(tmp_path / "model-00001-of-00002.gguf")
