"""Decoders and encoders with the weights of transformers' own: the same logits, in one pass and through a cache."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers

from q4_lm import TransformerDecoder, TransformerEncoder, config_from_hf, config_to_hf
from q4_lm.models.hf_names import from_hf_name, fused_parts, to_hf_name

pytestmark = pytest.mark.peer

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
WITHOUT_GROUPS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
BASE = {"rope_theta": 10_000.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {**BASE, "rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {**BASE, "rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    ),
    "llama-3": ("Llama", {"rope_parameters": {**BASE, "rope_type": "llama3", **LLAMA3}}),
    "llama-yarn": ("Llama", {"rope_parameters": {**BASE, "rope_type": "yarn", **YARN}}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 5}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 5}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 5}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.25}
        | {"attention_multiplier": 0.125, "logits_scaling": 8.0},
    ),
    "phi3": ("Phi3", {"rope_parameters": {**BASE, "rope_type": "default", "partial_rotary_factor": 0.75}}),
    "phi3-long": (
        "Phi3",
        {"original_max_position_embeddings": 16, "rope_parameters": {**BASE, "rope_type": "longrope", **LONG}},
    ),
    "smollm3": ("SmolLM3", {}),
    "bert": ("Bert", {}),
}
HEADS = {"Gemma3Text": "Gemma3ForCausalLM", "Bert": "BertModel"}


def pair(name: str) -> tuple[Any, Any, Any]:
    """Return a random model of transformers, ours with its weights, and its config as a file would have it."""
    torch.manual_seed(0)
    kind, options = MODELS[name]
    sizes = WITHOUT_GROUPS if kind == "Bert" else SIZES
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    theirs = getattr(transformers, HEADS.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # far from where initialisation leaves norms and biases
            parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(3)
    told = json.loads(config.to_json_string())
    read = config_from_hf(told)
    ours = (TransformerDecoder if read.causal else TransformerEncoder)(read).eval()
    state: dict[str, torch.Tensor] = {}
    for key, value in theirs.state_dict().items():
        module, _, leaf = from_hf_name(key, read).rpartition(".")
        parts = fused_parts(module, read)
        rows = value.split(list(parts.values())) if len(parts) > 1 else [value]
        state |= {f"{part}.{leaf}": tensor for part, tensor in zip(parts, rows, strict=True)}
    ours.load_state_dict({key: value for key, value in state.items() if not key.startswith("pooler.")})
    return theirs, ours, told


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest difference over the greatest value."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "bert"])
def test_logits(name: str) -> None:
    """Logits of random tokens differ from float64 at most twice as much as transformers' own float32 does."""
    theirs, ours, _ = pair(name)
    tokens = torch.randint(0, 97, (2, 40))
    if name == "llama-dynamic":
        tokens = tokens[:, :32]  # a longer sequence turns all its tokens otherwise
    with torch.no_grad():
        expected = theirs(tokens).logits
        exact = copy.deepcopy(theirs).double()(tokens).logits
        own = error(expected, exact)  # theirs alone is up to 1.05e-6, which no limit of 1e-6 between two float32 allows
        assert error(ours(tokens), exact) < max(1e-6, 2 * own)
        if name == "phi3-long":  # as theirs, a cache keeps keys that were turned for a short sequence
            return
        cache = ours.make_cache(tokens.shape[1], 2)
        parts = [ours(piece, cache) for piece in tokens.split([11, 1, 9, 1, tokens.shape[1] - 22], 1)]
        assert error(torch.cat(parts, 1), expected) < 3e-6


def test_long_sequences_of_dynamic_scaling() -> None:
    """Over the first training's length, frequencies are those of the whole sequence's length."""
    theirs, ours, _ = pair("llama-dynamic")
    x = torch.randn(1, 60, 4, 16)
    cos, sin = theirs.model.rotary_emb(x, torch.arange(60)[None])
    turn = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    expected = turn(x, x, cos, sin, unsqueeze_dim=2)[0]
    assert ours.config.max_position_embeddings < 60
    # They round the new base to float32, which 59 positions multiply.
    assert error(ours.layers[0].self_attn.rotary(x), expected) < 59 * torch.finfo(torch.float32).eps


def test_features() -> None:
    """Features of an encoder are transformers' own to float32 rounding, with padding and two segments."""
    theirs, ours, _ = pair("bert")
    tokens, types = torch.randint(0, 97, (2, 40)), torch.randint(0, 2, (2, 40))
    allowed = torch.arange(40)[None] < torch.tensor([[40], [30]])
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=allowed.long(), token_type_ids=types).last_hidden_state
        found = ours(tokens, allowed=allowed, types=types)
    assert error(found[allowed], expected[allowed]) < 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_names_and_configs_go_both_ways(name: str) -> None:
    """A config in transformers' form is read as the same config; every name goes there and back."""
    theirs, ours, told = pair(name)
    again = config_to_hf(ours.config, told["model_type"])
    assert config_from_hf(again) == config_from_hf(told)
    assert type(theirs.config).from_dict(again).num_hidden_layers == 4
    names = [*ours.state_dict()]
    assert [from_hf_name(to_hf_name(key, ours.config), ours.config) for key in names] == names
