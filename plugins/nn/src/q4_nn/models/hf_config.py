"""``config.json`` of a Hugging Face directory, to a ``TransformerConfig`` and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from q4_nn.blocks.rotary import RopeScaling
from q4_nn.models.config import TransformerConfig
from q4_nn.models.read_json import read_json
from q4core import CheckpointError, ConfigError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["DECODERS", "config_from_hf", "config_to_hf", "read_config"]

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "smollm3")
_KNOWN = (*DECODERS, "bert")
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}
_MISSING: Any = object()
_PLAIN = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@attrs.frozen
class _Values:
    """The values of a ``config.json``, each asked for by name.

    Args:
        values: What the file holds.
        where: The file, for messages.
    """

    values: Mapping[str, Any]
    where: str

    def fail(self, name: str, rule: str, value: object, hint: str | None = None) -> NoReturn:
        raise CheckpointError("model config", name=name, rule=rule, value=value, where=self.where, hint=hint)

    def get(self, name: str, default: Any = _MISSING) -> Any:
        """Return a value; ``default`` where it is absent or null."""
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            self.fail(name, "given", value)
        return default

    def refuse(self, name: str, *legal: Any) -> None:
        """Fail where a value is set to what is not computed here."""
        value = self.values.get(name)
        if value not in (None, *legal):
            self.fail(name, f"one of {', '.join(map(repr, (None, *legal)))}", value)


def read_config(folder: Path) -> TransformerConfig:
    """Return the config of a model folder, as ``TransformerConfig.from_hf`` does."""
    values = read_json(folder / "config.json")
    if not values:
        raise CheckpointError("model folder", name="config.json", rule="present", where=str(folder))
    return config_from_hf(values, where=str(folder / "config.json"))


def config_from_hf(values: Mapping[str, Any], *, where: str = "config.json") -> TransformerConfig:
    """Return the config of a Hugging Face model.

    Args:
        values: What its ``config.json`` holds; of a model with a ``text_config``, that part is read.
        where: The file, for messages.

    Raises:
        CheckpointError: The kind of model is not known, or asks for what is not computed here.
    """
    if isinstance(values.get("text_config"), dict):
        values = {**values["text_config"]}
    told = _Values(values, where)
    kind = told.get("model_type")
    if kind not in _KNOWN:
        close = closest_name(str(kind), _KNOWN)
        hint = f"Did you mean {close!r}?" if close else "A GGUF file of a Llama-family model can be read as well."
        told.fail("model_type", f"one of {', '.join(_KNOWN)}", kind, hint)
    try:
        return _bert(told) if kind == "bert" else _decoder(told, kind)
    except ConfigError as error:
        raise CheckpointError(
            "model config", name=error.name, rule=error.rule, value=error.value, where=where, hint=error.hint
        ) from error


def _sizes(told: _Values) -> dict[str, Any]:
    act = told.get("hidden_act", told.get("hidden_activation", "silu"))
    return {
        **{name: told.get(name) for name in _PLAIN},
        "max_position_embeddings": told.get("max_position_embeddings", 2048),
        "hidden_act": _ACTIVATIONS.get(act, act),
        "initializer_range": told.get("initializer_range", 0.02),
    }


def _bert(told: _Values) -> TransformerConfig:
    told.refuse("position_embedding_type", "absolute")
    told.refuse("is_decoder", False)  # noqa: FBT003  # a value of the file
    return TransformerConfig(
        **_sizes(told),
        causal=False,
        gated=False,
        norm="layer",
        norm_eps=told.get("layer_norm_eps", 1e-12),
        norm_position="post",
        positions="learned",
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        type_vocab_size=told.get("type_vocab_size", 0),
        dropout=told.get("hidden_dropout_prob", 0.1),
        attention_dropout=told.get("attention_probs_dropout_prob", 0.1),
    )


def _decoder(told: _Values, kind: str) -> TransformerConfig:
    told.refuse("final_logit_softcapping")
    told.refuse("attn_logit_softcapping")
    told.refuse("use_bidirectional_attention", False)  # noqa: FBT003  # a value of the file
    sizes = _sizes(told)
    heads, hidden, layers = sizes["num_attention_heads"], sizes["hidden_size"], sizes["num_hidden_layers"]
    gemma = kind == "gemma3_text"
    head_dim = told.get("head_dim", hidden // heads)
    rope, local = _rope(told)
    bias = bool(told.get("attention_bias", kind == "qwen2"))
    window, sliding = _sliding(told, kind, layers)
    turns = told.get("no_rope_layers", [1] * layers) if kind == "smollm3" else [1] * layers
    return TransformerConfig(
        **sizes,
        num_key_value_heads=told.get("num_key_value_heads", heads),
        head_dim=head_dim,
        norm="offset_rms" if gemma else "rms",
        norm_eps=told.get("rms_norm_eps", 1e-6),
        norm_position="both" if gemma else "pre",
        rope_theta=rope["rope_theta"],
        rope_scaling=RopeScaling.from_hf(rope, sizes["max_position_embeddings"]),
        rope_dim=int(head_dim * rope.get("partial_rotary_factor", told.get("partial_rotary_factor", 1.0))),
        no_rope_layers=[layer for layer, turn in enumerate(turns) if not turn],
        sliding_window=window if sliding else None,
        sliding_layers=sliding,
        local_rope_theta=local,
        attention_bias=bias,
        attention_out_bias=bias and kind != "qwen2",
        mlp_bias=bool(told.get("mlp_bias", False)),
        qk_norm=kind in {"qwen3", "gemma3_text"},
        attention_scale=told.get("query_pre_attn_scalar") ** -0.5 if gemma else None,
        attention_dropout=told.get("attention_dropout", 0.0),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        tie_word_embeddings=bool(told.get("tie_word_embeddings", kind in {"gemma3_text", "smollm3"})),
    )


def _rope(told: _Values) -> tuple[dict[str, Any], float | None]:
    """Return the rotary options of the blocks that see everything, and the base of the sliding ones."""
    both = told.get("rope_parameters", None)
    original = told.get("original_max_position_embeddings", None)  # Phi-3 has it there
    first = {"rope_theta": told.get("rope_theta", 10_000.0)}
    first |= {} if original is None else {"original_max_position_embeddings": original}
    if both is None:  # before transformers 5
        return first | told.get("rope_scaling", {}), told.get("rope_local_base_freq", None)
    if "full_attention" in both:
        local = both.get("sliding_attention", {"rope_theta": None})
        if local.get("rope_type", "default") != "default":
            told.fail("rope_parameters.sliding_attention.rope_type", "'default'", local["rope_type"])
        return first | both["full_attention"], local["rope_theta"]
    return first | both, None


def _sliding(told: _Values, kind: str, layers: int) -> tuple[int | None, list[int]]:
    """Return the window, and the indices of the blocks that have one."""
    window = told.get("sliding_window", None)
    if window is None or (kind in {"qwen2", "qwen3", "smollm3"} and not told.get("use_sliding_window", False)):
        return None, []
    types = told.get("layer_types", None)
    if types is not None:
        return window, [layer for layer, name in enumerate(types) if name == "sliding_attention"]
    if kind in {"mistral", "phi3"}:
        return window, [*range(layers)]
    if kind == "gemma3_text":
        every = told.get("sliding_window_pattern", told.get("_sliding_window_pattern", 6))
        return window, [layer for layer in range(layers) if (layer + 1) % every]
    first = told.get("max_window_layers", layers)
    return window, [*range(min(first, layers), layers)]


def config_to_hf(config: TransformerConfig, model_type: str = "llama") -> dict[str, Any]:
    """Return a ``config.json`` for a model, of a kind that computes the same.

    Args:
        config: The model's.
        model_type: One of the decoders' names, or ``bert``.

    Raises:
        ConfigError: The kind does not compute what the config says.
    """
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, **config.rope_scaling.to_hf()}
    if config.rope_dim != config.head_dim:
        rope["partial_rotary_factor"] = config.rope_dim / config.head_dim
    act = {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.hidden_act, config.hidden_act)
    told: dict[str, Any] = {
        "model_type": model_type,
        **{name: getattr(config, name) for name in _PLAIN},
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
    }
    if model_type == "bert":
        told |= {"hidden_act": act, "layer_norm_eps": config.norm_eps, "type_vocab_size": config.type_vocab_size}
        told |= {"hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": config.attention_dropout}
    else:
        told |= {"hidden_activation" if model_type == "gemma3_text" else "hidden_act": act}
        told |= {"num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim}
        told |= {"rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tie_word_embeddings}
        told |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias, "rope_parameters": rope}
        told |= {"attention_dropout": config.attention_dropout, "sliding_window": config.sliding_window}
        if model_type not in {"llama", "mistral", "phi3"}:
            told["use_sliding_window"] = bool(config.sliding_layers)
            sliding = frozenset(config.sliding_layers)
            kinds = ("full_attention", "sliding_attention")
            told["layer_types"] = [kinds[layer in sliding] for layer in range(config.num_hidden_layers)]
        if model_type == "gemma3_text":
            told["query_pre_attn_scalar"] = round((config.attention_scale or config.head_dim**-0.5) ** -2)
            local = {"rope_type": "default", "rope_theta": config.local_rope_theta or config.rope_theta}
            told["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
        if model_type == "smollm3":
            told["no_rope_layers"] = [int(i not in config.no_rope_layers) for i in range(config.num_hidden_layers)]
    again = config_from_hf(told)
    changed = [
        field.name
        for field in attrs.fields(TransformerConfig)
        if field.name != "rope_interleaved" and not _alike(getattr(again, field.name), getattr(config, field.name))
    ]
    if changed:
        rule = f"a kind that has this config's {', '.join(changed)}"
        raise ConfigError("to_hf", name="model_type", rule=rule, value=model_type)
    return told


def _alike(one: object, other: object) -> bool:
    if isinstance(one, RopeScaling) and isinstance(other, RopeScaling) and one.kind == other.kind == "default":
        return True
    if isinstance(one, float) and isinstance(other, (int, float)):
        return abs(one - other) <= 1e-12 * abs(one)
    return one == other
