"""Defaults of each kind of Hugging Face model, where its ``config.json`` says nothing: those of its config class.

Reference:
    The config classes of transformers 5; ``tests/peers/test_config_defaults.py`` compares every one of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULTS", "Values"]

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _kind(sizes: tuple[int, int, int, int, int], context: int, kv_heads: int | None, **others: Any) -> dict[str, Any]:
    """Return the defaults of a kind of decoder; a key that is not among them has no meaning for the kind."""
    return {
        **dict(zip(_SIZES, sizes, strict=True)),
        "max_position_embeddings": context,
        "num_key_value_heads": kv_heads,
        "head_dim": None,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "rope_parameters": None,
        "original_max_position_embeddings": None,
        **others,
    }


_BIAS = {"attention_bias": False, "mlp_bias": False}
_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_QWEN_SIZES = (151_936, 4096, 22_016, 32, 32)
_GEMMA3 = _kind(
    (262_208, 2304, 9216, 26, 8),
    131_072,
    4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    attention_bias=False,
    tie_word_embeddings=True,
    rope_theta=1_000_000.0,
    rope_local_base_freq=10_000.0,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    sliding_window_pattern=6,
    layer_types=None,
)
_GEMMA2 = {
    **_kind((256_000, 2304, 9216, 26, 8), 8192, 4, head_dim=256, attention_bias=False, tie_word_embeddings=True),
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
for _gemma in (_GEMMA2, _GEMMA3):
    del _gemma["hidden_act"]
_OLMO_SIZES = (50_304, 4096, 11_008, 32, 32)
_BERT: dict[str, Any] = {
    **dict(zip(_SIZES, (30_522, 768, 3072, 12, 12), strict=True)),
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _kind((32_000, 4096, 11_008, 32, 32), 2048, None, **_BIAS),
    "mistral": _kind((32_000, 4096, 14_336, 32, 32), 131_072, 8, sliding_window=4096),
    "qwen2": _kind(_QWEN_SIZES, 32_768, 32, **_WINDOWS),
    "qwen3": _kind(_QWEN_SIZES, 32_768, 32, head_dim=128, attention_bias=False, **_WINDOWS),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "olmo2": _kind(_OLMO_SIZES, 2048, None, attention_bias=False, rms_norm_eps=1e-5),
    "olmo3": _kind(
        _OLMO_SIZES,
        2048,
        None,
        attention_bias=False,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        sliding_window=4096,
        layer_types=None,
    ),
    "granite": _kind(
        (32_000, 4096, 11_008, 32, 32),
        2048,
        None,
        **_BIAS,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        attention_multiplier=1.0,
        logits_scaling=1.0,
    ),
    "mixtral": _kind(
        (32_000, 4096, 14_336, 32, 32),
        131_072,
        8,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": _kind(
        (151_936, 2048, 6144, 24, 32),
        32_768,
        4,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=4096,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
    "gpt_oss": _kind(
        (201_088, 2880, 2880, 36, 64),
        131_072,
        8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        attention_bias=True,
        sliding_window=128,
        layer_types=None,
        num_local_experts=128,
        num_experts_per_tok=4,
    ),
    "phi3": _kind(
        (32_064, 3072, 8192, 32, 32),
        4096,
        None,
        rms_norm_eps=1e-5,
        resid_pdrop=0.0,
        sliding_window=None,
        original_max_position_embeddings=4096,
        partial_rotary_factor=1.0,
    ),
    "smollm3": _kind(
        (128_256, 2048, 11_008, 36, 16),
        32_768,
        4,
        **_BIAS,
        tie_word_embeddings=True,
        rope_theta=2_000_000.0,
        use_sliding_window=False,
        sliding_window=None,
        layer_types=None,
        no_rope_layers=None,
        no_rope_layer_interval=4,
    ),
    "bert": _BERT,
    "roberta": _BERT | {"pad_token_id": 1, "vocab_size": 50_265},
    "xlm-roberta": _BERT | {"pad_token_id": 1},
    "nomic_bert": {
        **_BERT,
        "max_position_embeddings": 2048,
        "vocab_size": 30_528,
        "hidden_act": "silu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "head_dim": None,
        "rope_theta": 1000.0,
        "rope_parameters": None,
    },
    "modernbert": {
        **dict(zip(_SIZES, (50_368, 768, 1152, 22, 12), strict=True)),
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu",
        "initializer_range": 0.02,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "layer_types": None,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "rope_parameters": None,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
    },
}
"""Kind of model → key → its default. A key that a kind lacks is one that its class does not read."""
_NULLABLE = frozenset(
    {"sliding_window", "num_key_value_heads", "attention_dropout"}
    | {"attn_logit_softcapping", "final_logit_softcapping"}
)
"""Keys that may be null where the default is a value: no window, as many as query heads, none, no bound."""


@attrs.frozen
class Values:
    """The values of a ``config.json``, each asked for by name; one that is absent has its kind's default.

    Args:
        values: What the file holds.
        where: The file, for messages.
        kind: The model's type.
    """

    values: Mapping[str, Any]
    where: str
    kind: str

    def fail(self, name: str, rule: str, value: object, hint: str | None = None) -> NoReturn:
        """Raise a ``CheckpointError`` that names the file, the key, the rule and the value."""
        raise CheckpointError("model config", name=name, rule=rule, value=value, where=self.where, hint=hint)

    def has(self, name: str) -> bool:
        """Return whether the kind's class reads the key."""
        return name in DEFAULTS[self.kind]

    def get(self, name: str) -> Any:
        """Return a value; None where the file says null, or where that is the default, or the kind has no such key.

        Raises:
            CheckpointError: The file says null, and the kind needs a value.
        """
        if not self.has(name):
            return None
        default = DEFAULTS[self.kind][name]
        value = self.values.get(name, default)
        if value is None and default is not None and name not in _NULLABLE:
            self.fail(name, f"given, or left out for the default {default!r}", value)
        return value

    def count(self, name: str) -> int:
        """Return a positive whole number.

        Raises:
            CheckpointError: It is another value.
        """
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(name, "a positive whole number", value)
        return value

    def number(self, name: str) -> float:
        """Return a finite number; 0 for null, or where the kind has no such key.

        Raises:
            CheckpointError: It is another value.
        """
        value = self.get(name)
        return 0.0 if value is None else self.finite(name, value)

    def finite(self, name: str, value: Any) -> float:
        """Return a value that must be a finite number.

        Raises:
            CheckpointError: It is another one.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.fail(name, "a finite number", value)
        return value

    def options(self, name: str) -> dict[str, Any]:
        """Return what a key holds by name; nothing for null.

        Raises:
            CheckpointError: It is another value.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            self.fail(name, "an object", value)
        return value or {}

    def refuse(self, name: str, *legal: Any) -> None:
        """Fail where a value is set to what is not computed here."""
        value = self.values.get(name)
        if value not in (None, *legal):
            self.fail(name, f"one of {', '.join(map(repr, (None, *legal)))}", value)
