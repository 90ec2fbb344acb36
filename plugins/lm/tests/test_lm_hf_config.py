"""``config.json`` of Hugging Face: defaults of each kind, and what is refused by its key.

``tests/peers/test_config_defaults.py`` compares every default with transformers' own classes.
"""

from __future__ import annotations

from typing import Any

import pytest

import q4core as q4
from q4_lm import TransformerConfig, config_from_hf
from q4_nn import RopeScaling

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 50}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}


def read(kind: str, **facts: Any) -> TransformerConfig:
    """Return the config of a kind of model with small sizes."""
    return config_from_hf({"model_type": kind, **TINY, "num_key_value_heads": 2, **facts})


def test_absent_keys_have_the_kinds_own_defaults() -> None:
    """What a file leaves out is what the kind's class has, not what a Llama has."""
    gemma = read("gemma3_text")
    assert (gemma.head_dim, gemma.hidden_act, gemma.rope_theta, gemma.local_rope_theta) == (256, "gelu_tanh", 1e6, 1e4)
    assert (gemma.sliding_window, gemma.sliding_layers, gemma.tie_word_embeddings) == (
        4096,
        (0, 1, 2, 3, 4, 6, 7),
        True,
    )
    assert read("smollm3").no_rope_layers == (3, 7)
    assert read("phi3").norm_eps == 1e-5
    assert read("qwen2", use_sliding_window=True, max_window_layers=6, sliding_window=9).sliding_layers == (6, 7)


def test_null_is_no_default() -> None:
    """A null window is none, where an absent one is the default."""
    assert read("mistral").windows == (4096,) * 8
    assert read("mistral", sliding_window=None).windows == (None,) * 8


def test_a_key_that_a_kind_does_not_read_changes_nothing() -> None:
    """A Llama has no window, whatever its file says of one."""
    assert read("llama", sliding_window=9) == read("llama")
    assert read("mistral", attention_bias=True) == read("mistral")


def test_the_text_part_of_a_model() -> None:
    """A text part is of the kind that its model has; whether the head is tied the model says first."""
    facts = {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": {**TINY, "num_key_value_heads": 2}}
    config = config_from_hf(facts)
    assert config == read("gemma3_text", tie_word_embeddings=False)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a null size": ("llama", {"hidden_size": None}, "hidden_size"),
    "a text for a size": ("llama", {"num_attention_heads": "8"}, "num_attention_heads"),
    "no heads": ("llama", {"num_attention_heads": 0}, "num_attention_heads"),
    "a text for a number": ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    "a text for a base": ("llama", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta"),
    "a text for options": ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
    "a share that is not read": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "nested rope": ("qwen3", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention"),
    "flat rope": ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
    "long factors": ("phi3", {"rope_scaling": LONG}, "rope_scaling.short_factor"),
    "no window": ("gemma3_text", {"sliding_window": None}, "sliding_window"),
    "too few turns": ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    "too few types": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    "unknown types": ("qwen3", {"layer_types": ["chunked_attention"] * 8}, "layer_types"),
    "types without window": ("qwen3", {"layer_types": ["sliding_attention"] * 8}, "layer_types"),
    "types not read": ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 4}, "layer_types"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """What is not legal, contradicts itself or is not computed is refused by its key."""
    kind, facts, key = REFUSED[case]
    with pytest.raises(q4.CheckpointError) as caught:
        read(kind, **facts)
    assert caught.value.name == key


def test_scalings_read_what_is_theirs() -> None:
    """A dynamic scaling counts from the model's context; only YaRN and LongRoPE have a factor of amplitude."""
    facts = {"factor": 2.0, "attention_factor": 0.5, "original_max_position_embeddings": 16}
    assert RopeScaling.from_hf({"rope_type": "dynamic", **facts}, 64).original_context == 64
    assert RopeScaling.from_hf({"rope_type": "linear", **facts}, 64).amplitude() == 1.0
    assert RopeScaling.from_hf({"rope_type": "yarn", **facts}, 64).amplitude() == 0.5
