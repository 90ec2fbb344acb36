"""``config.json`` of a Hugging Face directory, to a ``TransformerConfig`` and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from q4_lm.models.config import TransformerConfig
from q4_lm.models.hf_defaults import DEFAULTS, Values
from q4_lm.models.read_json import read_json
from q4_nn.blocks.rotary import RopeScaling
from q4core import CheckpointError, ConfigError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    import os

__all__ = ["config_from_hf", "config_to_hf"]

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}
_PLAIN = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_RANGED = frozenset({"llama3", "yarn", "longrope"})
"""Scalings that look at the context of the first training."""
_SLIDING_BUT = {"gemma2": 2, "gpt_oss": 2, "olmo3": 4}
"""Kinds of which all blocks slide but each n-th, where the file does not list them."""
_NESTED = ("gemma3_text", "olmo3")
"""Kinds with rotary options for each type of block."""
_ROPE_OF_OSS = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_TEXT_PARTS = {"gemma3": "gemma3_text"}
"""Kind of a model of several parts → that of its text part, where this does not say it."""


def config_from_hf(source: Mapping[str, Any] | str | os.PathLike[str]) -> TransformerConfig:
    """Return the config of a Hugging Face model.

    Args:
        source: Its folder, or what its ``config.json`` holds; of a model with a ``text_config``, that part is read.

    Raises:
        CheckpointError: There is no such file, the kind of model is not known, or it asks for what is not computed
            here.
    """
    values, where = source, "config.json"
    if not isinstance(values, Mapping):
        file = Path(values, "config.json")
        values, where = read_json(file), str(file)
        if not values:
            raise CheckpointError("model folder", name="config.json", rule="present", where=str(file.parent))
    if isinstance(text := values.get("text_config"), dict):
        outer = {name: values[name] for name in ("tie_word_embeddings",) if name in values}
        values = {"model_type": _TEXT_PARTS.get(str(values.get("model_type"))), **text, **outer}
    kind = values.get("model_type")
    if kind not in DEFAULTS:
        close = closest_name(str(kind), DEFAULTS)
        hint = f"Did you mean {close!r}?" if close else "A GGUF file of a Llama-family model can be read as well."
        rule = f"one of {', '.join(DEFAULTS)}"
        raise CheckpointError("model config", name="model_type", rule=rule, value=kind, where=where, hint=hint)
    fields = Values(values, where, kind)
    try:
        return _ENCODERS.get(kind, _decoder)(fields)
    except ConfigError as error:
        raise CheckpointError(
            "model config", name=error.name, rule=error.rule, value=error.value, where=where, hint=error.hint
        ) from error


def _sizes(fields: Values) -> dict[str, Any]:
    act = fields.get("hidden_activation" if fields.has("hidden_activation") else "hidden_act")
    if fields.kind == "gpt_oss":
        fields.refuse("hidden_act", "silu")
        fields.refuse("swiglu_alpha", 1.702)
        fields.refuse("swiglu_limit", 7.0)
        act = "clamped_swiglu"
    inner = "moe_intermediate_size" if fields.has("moe_intermediate_size") else "intermediate_size"
    return {
        **{name: fields.count(name) for name in (*_PLAIN, "max_position_embeddings")},
        "intermediate_size": fields.count(inner),
        "hidden_act": _ACTIVATIONS.get(str(act), act),
        "initializer_range": fields.number("initializer_range"),
    }


def _bert(fields: Values) -> TransformerConfig:
    fields.refuse("position_embedding_type", "absolute")
    fields.refuse("is_decoder", False)  # noqa: FBT003  # a value of the file
    return TransformerConfig(
        **_sizes(fields),
        causal=False,
        gated=False,
        norm="layer",
        norm_eps=fields.number("layer_norm_eps"),
        norm_position="post",
        positions="learned",
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        type_vocab_size=fields.get("type_vocab_size"),
        dropout=fields.number("hidden_dropout_prob"),
        attention_dropout=fields.number("attention_probs_dropout_prob"),
    )


def _roberta(fields: Values) -> TransformerConfig:
    """Return BERT's config, with positions that begin behind the number of the padding token."""
    config, offset = _bert(fields), fields.get("pad_token_id") + 1
    if config.max_position_embeddings <= offset:
        fields.fail("max_position_embeddings", f"above {offset}, the first position", config.max_position_embeddings)
    room = config.max_position_embeddings - offset
    return attrs.evolve(config, max_position_embeddings=room, position_offset=offset)


def _nomic(fields: Values) -> TransformerConfig:
    """Return BERT's config with rotary positions, a gate, and no biases but those of norms."""
    rope, _ = _rope(fields)
    config = _bert(fields)
    return attrs.evolve(
        config,
        head_dim=config.head_dim if fields.get("head_dim") is None else fields.count("head_dim"),
        positions="rotary",
        gated=True,
        rope_theta=rope["rope_theta"],
        rope_scaling=RopeScaling.from_hf(rope, config.max_position_embeddings),
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
    )


def _modernbert(fields: Values) -> TransformerConfig:
    given, layers = fields.options("rope_parameters"), fields.count("num_hidden_layers")
    fields.refuse("rope_scaling")
    theta = {}
    for name, older in ((_FULL, "global_rope_theta"), (_SLIDING, "local_rope_theta")):
        rope = given.get(name) or {}
        if rope.get("rope_type", "default") != "default":
            fields.fail(f"rope_parameters.{name}.rope_type", "'default'", rope["rope_type"])
        theta[name] = fields.finite("rope_theta", rope.get("rope_theta", fields.get(older)))
    every = fields.count("global_attn_every_n_layers")
    types = fields.get("layer_types") or [_SLIDING if layer % every else _FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {_FULL, _SLIDING}:
        fields.fail("layer_types", f"{layers} of {_FULL!r} and {_SLIDING!r}", types)
    sliding = [layer for layer, name in enumerate(types) if name == _SLIDING]
    return TransformerConfig(
        **_sizes(fields),
        causal=False,
        norm="layer",
        norm_eps=fields.number("norm_eps"),
        norm_bias=bool(fields.get("norm_bias")),
        embedding_norm=True,
        rope_theta=theta[_FULL],
        local_rope_theta=theta[_SLIDING],
        sliding_window=fields.count("local_attention") // 2 + 1 if sliding else None,
        sliding_layers=sliding,
        attention_bias=bool(fields.get("attention_bias")),
        attention_out_bias=bool(fields.get("attention_bias")),
        mlp_bias=bool(fields.get("mlp_bias")),
        attention_dropout=fields.number("attention_dropout"),
    )


_ENCODERS = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "nomic_bert": _nomic,
    "modernbert": _modernbert,
}
"""Kind → what reads its config; all others are decoders."""


def _decoder(fields: Values) -> TransformerConfig:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    for name in caps:
        if not fields.has(name):
            fields.refuse(name)
    fields.refuse("use_bidirectional_attention", False)  # noqa: FBT003  # a value of the file
    sizes = _sizes(fields)
    heads, hidden, layers = sizes["num_attention_heads"], sizes["hidden_size"], sizes["num_hidden_layers"]
    gemma, qwen2 = fields.kind in {"gemma2", "gemma3_text"}, fields.kind == "qwen2"
    olmo, granite, oss = fields.kind in {"olmo2", "olmo3"}, fields.kind == "granite", fields.kind == "gpt_oss"
    head_dim = hidden // heads if fields.get("head_dim") is None else fields.count("head_dim")
    rope, local = _rope(fields)
    bias = qwen2 or bool(fields.get("attention_bias"))
    scale = fields.count("query_pre_attn_scalar") ** -0.5 if gemma else None
    turns = _turns(fields, layers)
    window, sliding = _sliding(fields, turns)
    return TransformerConfig(
        **sizes,
        num_key_value_heads=heads if fields.get("num_key_value_heads") is None else fields.count("num_key_value_heads"),
        head_dim=head_dim,
        norm="offset_rms" if gemma else "rms",
        norm_eps=fields.number("rms_norm_eps"),
        norm_position="both" if gemma else "after" if olmo else "pre",
        rope_theta=rope["rope_theta"],
        rope_scaling=RopeScaling.from_hf(rope, sizes["max_position_embeddings"]),
        rope_dim=int(head_dim * rope["partial_rotary_factor"]),
        no_rope_layers=[layer for layer, turn in enumerate(turns) if not turn],
        sliding_window=window if sliding else None,
        sliding_layers=sliding,
        local_rope_theta=local,
        attention_bias=bias,
        attention_out_bias=bias and not qwen2,
        mlp_bias=oss or bool(fields.get("mlp_bias")),
        qk_norm=olmo or fields.kind in {"qwen3", "qwen3_moe", "gemma3_text"},
        qk_norm_heads=not olmo,
        attention_scale=fields.number("attention_multiplier") if granite else scale,
        attention_sinks=oss,
        attention_dropout=fields.number("attention_dropout"),
        dropout=fields.number("resid_pdrop"),
        embedding_scale=fields.number("embedding_multiplier") if granite else hidden**0.5 if gemma else 1.0,
        residual_scale=fields.number("residual_multiplier") if granite else 1.0,
        logit_scale=1 / (fields.number("logits_scaling") or math.inf) if granite else 1.0,
        attn_logit_softcapping=fields.number(caps[0]) or None,
        final_logit_softcapping=fields.number(caps[1]) or None,
        **_experts(fields),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
    )


def _experts(fields: Values) -> dict[str, Any]:
    """Return the options of experts, and what one has inside."""
    if not fields.has("num_experts_per_tok"):
        return {}
    fields.refuse("decoder_sparse_step", 1)
    fields.refuse("mlp_only_layers", [])
    names = ("num_experts", "num_local_experts")  # either is read, whatever the kind
    own, other = names if fields.has(names[0]) else reversed(names)
    if other in fields.values:
        fields = attrs.evolve(fields, values={own: fields.values[other], **fields.values})
    count = fields.count(own)
    normed = bool(fields.get("norm_topk_prob")) or not fields.has("norm_topk_prob")
    return {"num_experts": count, "num_experts_per_tok": fields.count("num_experts_per_tok"), "norm_topk_prob": normed}


def _rope(fields: Values) -> tuple[dict[str, Any], float | None]:
    """Return the rotary options of the blocks that see everything, and the base of the sliding ones."""
    before, now = fields.options("rope_scaling"), fields.options("rope_parameters")  # of transformers 4, and 5
    local = None
    if fields.kind in _NESTED:
        if now and not {_FULL, _SLIDING} & {*now}:
            fields.fail("rope_parameters", f"those of {_FULL} and of {_SLIDING}", now)
        full, sliding = (now.get(name) or {} for name in (_FULL, _SLIDING))
        given = {**full, **before}
        if sliding.get("rope_type", "default") != "default":
            fields.fail(f"rope_parameters.{_SLIDING}.rope_type", "'default'", sliding["rope_type"])
        default = fields.get("rope_local_base_freq") or DEFAULTS[fields.kind]["rope_theta"]
        local = fields.finite("rope_theta", sliding.get("rope_theta", default))
    else:
        given = before or now or (_ROPE_OF_OSS if fields.kind == "gpt_oss" else {})
    if nested := [name for name, value in given.items() if isinstance(value, dict)]:
        fields.fail(f"rope_parameters.{nested[0]}", "a number or a text", given[nested[0]])
    kind = given.get("rope_type", given.get("type", "default"))
    is_phi3 = fields.kind == "phi3"
    if is_phi3 and kind in {"su", "yarn"}:
        kind = "longrope"  # by their older names
    rope = {
        **given,
        "rope_type": kind,
        "rope_theta": fields.finite("rope_theta", given.get("rope_theta", fields.get("rope_theta"))),
    }
    original = fields.get("original_max_position_embeddings")
    if original is not None and kind in _RANGED:
        rope["original_max_position_embeddings"] = original
    share = rope.get("partial_rotary_factor", fields.values.get("partial_rotary_factor", 1.0))
    rope["partial_rotary_factor"] = fields.finite("partial_rotary_factor", share)
    if share != 1 and not is_phi3:
        fields.fail("partial_rotary_factor", f"1, for a model of type {fields.kind!r}", share)
    return rope, local


def _turns(fields: Values, layers: int) -> list[Any]:
    """Return for each block whether it turns queries and keys."""
    turns = fields.get("no_rope_layers")
    if turns is None:
        every = fields.count("no_rope_layer_interval") if fields.has("no_rope_layer_interval") else layers + 1
        return [(layer + 1) % every for layer in range(layers)]
    if not isinstance(turns, list) or len(turns) < layers:
        fields.fail("no_rope_layers", f"a list of {layers} or more", turns)
    return turns[:layers]


def _sliding(fields: Values, turns: list[Any]) -> tuple[int | None, list[int]]:
    """Return the window, and the indices of the blocks that have one."""
    window, layers = fields.get("sliding_window"), len(turns)
    is_used = window is not None and (not fields.has("use_sliding_window") or bool(fields.get("use_sliding_window")))
    if fields.kind == "gemma3_text":  # some of its blocks slide in any case
        every = fields.count("sliding_window_pattern")
        sliding, is_used = [layer for layer in range(layers) if (layer + 1) % every], True
    elif fields.kind in _SLIDING_BUT:
        sliding, is_used = [layer for layer in range(layers) if (layer + 1) % _SLIDING_BUT[fields.kind]], True
    elif not is_used:
        sliding = []
    elif fields.kind == "smollm3":
        sliding = [layer for layer, turn in enumerate(turns) if not turn]
    else:
        sliding = [*range(fields.get("max_window_layers") or 0, layers)]
    types = fields.values.get("layer_types")
    if types is None:
        return window, sliding
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {_FULL, _SLIDING}:
        fields.fail("layer_types", f"{layers} of {_FULL!r} and {_SLIDING!r}", types)
    given = [layer for layer, name in enumerate(types) if name == _SLIDING]
    if given != sliding and not (fields.has("layer_types") and is_used):
        rule = "everywhere" if sliding else "nowhere"
        fields.fail("layer_types", f"{_SLIDING!r} {rule}, as sliding_window says", types)
    return window, given


def config_to_hf(config: TransformerConfig, model_type: str = "llama") -> dict[str, Any]:
    """Return a ``config.json`` for a model, of a kind that computes the same.

    Args:
        config: The model's.
        model_type: One of the decoders' names, or ``bert``.

    Raises:
        ConfigError: The kind does not compute what the config says.
    """
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, **config.rope_scaling.to_hf()}
    if model_type == "phi3":
        rope["partial_rotary_factor"] = config.rope_dim / config.head_dim
    act = {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.hidden_act, config.hidden_act)
    result: dict[str, Any] = {
        "model_type": model_type,
        **{name: getattr(config, name) for name in _PLAIN},
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
    }
    if model_type == "bert":
        result |= {"hidden_act": act, "layer_norm_eps": config.norm_eps, "type_vocab_size": config.type_vocab_size}
        result |= {"hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": config.attention_dropout}
    else:
        act = "silu" if model_type == "gpt_oss" and act == "clamped_swiglu" else act
        result |= {"hidden_activation" if model_type.startswith("gemma") else "hidden_act": act}
        result |= {"num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim}
        result |= {"rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tie_word_embeddings}
        result |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias, "rope_parameters": rope}
        result |= {"attention_dropout": config.attention_dropout, "sliding_window": config.sliding_window}
        if "use_sliding_window" in DEFAULTS[model_type]:
            result["use_sliding_window"] = bool(config.sliding_layers)
        if "layer_types" in DEFAULTS[model_type]:
            sliding, kinds = frozenset(config.sliding_layers), (_FULL, _SLIDING)
            result["layer_types"] = [kinds[layer in sliding] for layer in range(config.num_hidden_layers)]
        result |= _own_facts(config, model_type, rope)
    again = config_from_hf(result)
    changed = [
        field.name
        for field in attrs.fields(TransformerConfig)
        if field.name != "rope_interleaved" and not _alike(getattr(again, field.name), getattr(config, field.name))
    ]
    if changed:
        rule = f"a kind that has this config's {', '.join(changed)}"
        raise ConfigError("to_hf", name="model_type", rule=rule, value=model_type)
    return result


def _own_facts(config: TransformerConfig, kind: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Return what some kinds of decoders alone have."""
    result: dict[str, Any] = {}
    scale = config.attention_scale or config.head_dim**-0.5
    if kind.startswith("gemma"):
        result["query_pre_attn_scalar"] = round(scale**-2)
        result |= {name: getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if kind in _NESTED:
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta or config.rope_theta}
        result["rope_parameters"] = {_FULL: rope, _SLIDING: local}
    if kind == "granite":
        result |= {"embedding_multiplier": config.embedding_scale, "residual_multiplier": config.residual_scale}
        result |= {"attention_multiplier": scale, "logits_scaling": 1 / config.logit_scale}
    if config.num_experts:
        result |= dict.fromkeys(("num_experts", "num_local_experts"), config.num_experts)
        result |= {name: getattr(config, name) for name in ("num_experts_per_tok", "norm_topk_prob")}
        result["moe_intermediate_size"] = config.intermediate_size
    if kind == "phi3":
        result["resid_pdrop"] = config.dropout
        result |= {name: rope[name] for name in ("original_max_position_embeddings",) if name in rope}
    if kind == "smollm3":
        result["no_rope_layers"] = [int(i not in config.no_rope_layers) for i in range(config.num_hidden_layers)]
    return result


def _alike(one: object, other: object) -> bool:
    if isinstance(one, RopeScaling) and isinstance(other, RopeScaling) and one.kind in {"default", "linear"}:
        return (one.kind, one.factor) == (other.kind, other.factor)  # which have no other options
    if isinstance(one, float) and isinstance(other, (int, float)):
        return abs(one - other) <= 1e-12 * abs(one)
    return one == other
