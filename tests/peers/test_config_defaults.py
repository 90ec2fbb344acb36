"""What a ``config.json`` leaves out: the defaults of transformers' own config classes, key by key and all at once."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
import torch
import transformers

import q4core as q4
from q4_lm import TransformerConfig, config_from_hf, load_model
from q4_lm.models.hf_defaults import DEFAULTS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.peer

CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "granite": "Granite",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "gpt_oss": "GptOss",
    "phi3": "Phi3",
    "smollm3": "SmolLM3",
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "nomic_bert": "NomicBert",
    "modernbert": "ModernBert",
}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1 + i / 8 for i in range(4)], "long_factor": [2.0 + i for i in range(4)]}
COMMON = {
    **TINY,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 96,
    "initializer_range": 0.05,
    "rms_norm_eps": 1e-3,
    "attention_dropout": 0.25,
    "rope_theta": 777.0,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 3}
OTHER: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        "original_max_position_embeddings": 24,
        "sliding_window": 3,
    },
    "mistral": {**COMMON, "head_dim": 16, "sliding_window": 12, "tie_word_embeddings": True},
    "qwen2": {**COMMON, **WINDOWS, "rope_scaling": {"type": "yarn", "factor": 4.0}, "tie_word_embeddings": True},
    "qwen3": {**COMMON, **WINDOWS, "head_dim": 16, "attention_bias": True},
    "gemma3_text": {
        **COMMON,
        "head_dim": 16,
        "hidden_activation": "gelu",
        "attention_bias": True,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 99.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "gemma2": {
        **COMMON,
        "head_dim": 16,
        "hidden_activation": "gelu",
        "attention_bias": True,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "attn_logit_softcapping": 7.0,
        "final_logit_softcapping": 9.0,
        "tie_word_embeddings": False,
    },
    "olmo2": {**COMMON, "attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "olmo3": {
        **COMMON,
        "attention_bias": True,
        "rope_theta": 500_000.0,  # of another one, transformers gives sliding blocks the default
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
        "sliding_window": 12,
    },
    "granite": {
        **COMMON,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.125,
        "logits_scaling": 4.0,
    },
    "mixtral": {**COMMON, "head_dim": 16, "sliding_window": 12, "num_local_experts": 3, "num_experts_per_tok": 1},
    "qwen3_moe": {
        **COMMON,
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 12,
        "moe_intermediate_size": 32,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        **COMMON,
        "hidden_act": "silu",
        "head_dim": 16,
        "attention_bias": False,
        "sliding_window": 12,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
    },
    "phi3": {
        **COMMON,
        "sliding_window": 12,
        "resid_pdrop": 0.125,
        "original_max_position_embeddings": 16,
        "rope_scaling": {"type": "longrope", **LONG},
    },
    "smollm3": {
        **COMMON,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 12,
        "no_rope_layer_interval": 3,
    },
    "bert": {
        **TINY,
        "hidden_act": "relu",
        "max_position_embeddings": 40,
        "initializer_range": 0.05,
        "layer_norm_eps": 1e-3,
        "type_vocab_size": 3,
        "hidden_dropout_prob": 0.25,
        "attention_probs_dropout_prob": 0.5,
    },
    "modernbert": {
        **TINY,
        "hidden_activation": "relu",
        "max_position_embeddings": 40,
        "initializer_range": 0.05,
        "norm_eps": 1e-3,
        "norm_bias": True,
        "attention_bias": True,
        "attention_dropout": 0.25,
        "mlp_bias": True,
        "local_attention": 12,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 777.0,
        "local_rope_theta": 99.0,
    },
}
OTHER["roberta"] = OTHER["xlm-roberta"] = {**OTHER["bert"], "pad_token_id": 2}
OTHER["nomic_bert"] = {**OTHER["bert"], "head_dim": 16, "rope_theta": 777.0}
"""Of each kind values that are not the defaults, as files of transformers 4 have them."""
ENCODERS = ("bert", "roberta", "xlm-roberta", "nomic_bert", "modernbert")


def resolved(told: dict[str, Any]) -> dict[str, Any]:
    """Return a config with everything that transformers' class puts where it says nothing."""
    kind = getattr(transformers, f"{CLASSES[told['model_type']]}Config")
    full: dict[str, Any] = json.loads(kind.from_dict(json.loads(json.dumps(told))).to_json_string(use_diff=False))
    return full


def read(told: dict[str, Any]) -> TransformerConfig | str:
    """Return the config that is read, or the name of what is refused."""
    try:
        return config_from_hf(told)
    except q4.CheckpointError as error:
        return str(error.name)


def check(told: dict[str, Any]) -> None:
    """Compare what is read of a config with what is read of the resolved one; what transformers refuses is refused."""
    try:
        full = resolved(told)
    except huggingface_hub.errors.StrictDataclassError:
        assert isinstance(read(told), str), told
    else:
        assert read(told) == read(full)


@pytest.mark.parametrize("form", ["as transformers 4 writes", "as transformers 5 writes", "of the defaults"])
@pytest.mark.parametrize("kind", CLASSES)
def test_each_key_left_out(kind: str, form: str) -> None:
    """A key that is left out has the class's own default, whatever the others say."""
    whole = {"model_type": kind, **(TINY if form == "of the defaults" else OTHER[kind])}
    if form != "as transformers 4 writes":
        whole = resolved(whole)
    check(whole)
    for key in [*whole]:
        if key != "model_type":
            check({name: value for name, value in whole.items() if name != key})
    check({"model_type": kind})


@pytest.mark.parametrize("kind", CLASSES)
def test_defaults_are_the_classes_own(kind: str) -> None:
    """The table holds the fields of transformers' class; each of its keys is one that the class knows or converts."""
    plain = getattr(transformers, f"{CLASSES[kind]}Config")
    fields = {name: field.default for name, field in plain.__dataclass_fields__.items()}
    converted = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}
    converted |= {"global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"}
    converted |= {"head_dim", "original_max_position_embeddings", "partial_rotary_factor"}  # any class takes them
    for key, default in DEFAULTS[kind].items():
        if key in fields:
            assert fields[key] == default, key
        else:
            assert key in converted, key


@pytest.mark.parametrize("kind", CLASSES)
def test_null_is_not_absent(kind: str) -> None:
    """A null is what transformers makes of it, such as no window, or an error."""
    for key in DEFAULTS[kind]:
        told = {"model_type": kind, **OTHER[kind], key: None}
        with contextlib.suppress(huggingface_hub.errors.StrictDataclassError, TypeError):  # what they raise for it
            assert read(told) in {key, read(resolved(told))}, key


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "gpt_oss"])
def test_logits_of_the_defaults(kind: str, tmp_path: Path) -> None:
    """A folder whose config states sizes alone gives the numbers of transformers' model of that config."""
    torch.manual_seed(0)
    told = {"model_type": kind, **TINY}
    told |= {"num_attention_heads": 32} if kind.startswith("qwen") else {}  # as many as key-value heads by default
    config = getattr(transformers, f"{CLASSES[kind]}Config").from_dict(dict(told))
    heads = {"gemma3_text": "Gemma3ForCausalLM", **{name: f"{CLASSES[name]}Model" for name in ENCODERS}}
    theirs = getattr(transformers, heads.get(kind, f"{CLASSES[kind]}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(3)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(told), encoding="utf-8")
    tokens = torch.randint(3, 96, (2, 40))
    with torch.inference_mode():
        expected = theirs(tokens)
        expected = expected.last_hidden_state if kind in ENCODERS else expected.logits
        found = load_model(tmp_path)(tokens)
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-6
