"""Tiny random models of transformers' families, made of the config classes alone, and what to call each with."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["FAMILIES", "UntriedFamilyError", "outputs_of", "tiny_config", "tiny_model"]

_KINDS = (
    "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_CTC",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_AUDIO_CLASSIFICATION", "MODEL",
)  # fmt: skip
"""The tables of classes, the first that has a family gives its class."""
VOCABULARY, WIDTH, HEADS, TOKENS = 128, 64, 4, 12
"""Sizes that every family gets."""
_LARGEST = 3_000_000
"""Parameters of a model that still takes less than a second."""
_LAYERS = (
    r"((en|de)coder_|num_|text_|vision_|decoder_num_)?(hidden_|n_)?(layers?|blocks)|n_layer|num_hidden_layers|depth"
    r"|num_(en|de)coder_layers|(en|de)coder_num_hidden_layers|encoder_depth|num_hidden_groups"
)
_SIZES: Mapping[str, int] = {
    r"(\w+_)?vocab_size(_\w+)?|num_embeddings|n_words|entity_vocab_size": VOCABULARY,
    r"(\w+_)?(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|embedding_size|emb_dim|width|n_embed|d_embed"
    r"|projection_dim|embedding_dim|output_dim|proj_size|lru_width)|attention_hidden_size": WIDTH,
    r"(\w+_)?(intermediate_size|ffn_dim|mlp_dim|inner_dim|n_inner|d_ff|d_inner|feed_forward_size|ffn_hidden_size)": 128,
    r"(\w+_)?(key_value_heads|kv_heads|num_attention_groups)": 2,
    r"(\w+_)?(attention_heads|num_heads|n_heads?|heads)": HEADS,
    r"(\w+_)?(head_dim|head_size|d_kv|qk_head_dim|d_head|kv_channels|attention_head_size|key_length)": WIDTH // HEADS,
    r"\w+_lora_rank|lora_rank": 32,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|\w*num_experts": 4,
    r"num_experts_per_tok|\w*top_?k(_experts)?|moe_k|moe_topk": 2,
    r"n_group|topk_group|n_groups|mamba_n_groups": 1,
    r"(\w+_)?image_size": 32,
    r"max_source_positions": 32,
    r"mamba_n_heads|mamba_num_heads": 8,
    r"mamba_d_head|mamba_head_dim": 16,
    r"state_size|mamba_d_state|ssm_state_size": 8,
    r"time_step_rank": 8,
    r"first_k_dense_replace": 1,
    r"(\w+_)?codebook_size|num_conv_pos_embeddings": 32,
}
"""Pattern of an attribute's name → the most that it may be."""
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_GIVEN: Mapping[str, Mapping[str, Any]] = {
    "BloomConfig": {"slow_but_exact": True, "pretraining_tp": 2},
    "CodeGenConfig": {"rotary_dim": 8},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "EsmConfig": {"vocab_size": VOCABULARY, "pad_token_id": 1},
    "GPTJConfig": {"rotary_dim": 8},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "Glm4vTextConfig": _SECTIONS,
    "Glm4vMoeTextConfig": _SECTIONS,
    "HunYuanDenseV1Config": {"head_dim": 16},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "HunYuanVLTextConfig": {"head_dim": 16},
    "Lfm2MoeConfig": {"layer_types": ["full_attention", "conv"]},
    "Mamba2Config": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "MinistralConfig": {"head_dim": 16},
    "NemotronConfig": {"num_key_value_heads": 2},
    "Qwen2VLTextConfig": _SECTIONS,
    "Qwen2_5_VLTextConfig": _SECTIONS,
    "Qwen2_5OmniTextConfig": _SECTIONS,
    "RwkvConfig": {"rescale_every": 1},
    "SwinConfig": {"embed_dim": 48, "depths": [1, 1], "num_heads": [3, 6], "window_size": 2, "patch_size": 4},
    "XmodConfig": {"default_language": "en_XX"},
}
"""Class of a config → what no general rule gives: sizes that depend on others, and paths that are rarely taken."""


class UntriedFamilyError(Exception):
    """No tiny model of a family can be made, or none can be called, by general rules; the message says why."""


def _families() -> Iterator[tuple[str, str]]:
    """Yield each model type and the class of its model, each pair of config and class once."""
    names, seen = configuration_auto.CONFIG_MAPPING_NAMES, set()
    for model_type in sorted(names, key=lambda key: _letters(key) != _letters(names[key].removesuffix("Config"))):
        for kind in _KINDS:
            name = getattr(modeling_auto, f"{kind}_MAPPING_NAMES").get(model_type)
            if name is not None:
                name = name if isinstance(name, str) else name[0]
                if (names[model_type], name) not in seen:
                    yield model_type, name
                seen.add((names[model_type], name))
                break


def _letters(name: str) -> str:
    return re.sub(r"\W|_", "", name).lower()


FAMILIES = dict(_families())
"""Model type → name of the class of its model."""


def _small(name: str, value: Any) -> Any:
    """Return what an attribute with a default value gets in a tiny model."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if re.fullmatch(r"\w+_(token_)?(id|index)|\w+_token", name):
            return value if value < VOCABULARY - 28 else VOCABULARY - 1 - value % 28
        return next((min(value, most) for rule, most in _SIZES.items() if re.fullmatch(rule, name)), value)
    return value


def tiny_config(kind: Any, layers: int = 2) -> Any:
    """Return a config of a class, with every size reduced, and as many layers at most."""
    options: dict[str, Any] = {}
    names = {field.name for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(kind):
        if isinstance(field.default, int | float | list | tuple) and field.init:
            value = _small(field.name, field.default)
            if re.fullmatch(_LAYERS, field.name) and isinstance(field.default, int):
                value = min(field.default, layers)
            if field.name == "num_key_value_heads" and "kv_lora_rank" in names:
                value = HEADS  # latent attention has none of its own
            if field.name == "conv_dim":
                value = tuple(min(size, 32) for size in field.default)
            if value != field.default:
                options[field.name] = value
    parts = getattr(kind, "sub_configs", {})
    if parts:
        default = kind()
        for name in parts:
            part = getattr(default, name, None)
            if part is not None:
                options[name] = tiny_config(type(part), layers)
    return kind(**{**options, **_GIVEN.get(kind.__name__, {})})


def tiny_model(model_type: str) -> tuple[Any, dict[str, Any]]:
    """Return a random model of a family, in float32, and what to call it with.

    Raises:
        UntriedFamilyError: The general rules make none.
    """
    reasons = []
    for layers in (2, 4, 8):  # some need one of each kind of their layers
        try:
            model = _build(model_type, layers)
        except Exception as error:  # noqa: BLE001  # whatever a family's own code raises
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        for given in _inputs(model):
            try:
                outputs = outputs_of(model, given)
            except Exception as error:  # noqa: BLE001  # as above
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            if outputs and all(item.numel() and torch.isfinite(item).all() for item in outputs):
                return model, given
            reasons.append("its outputs are not finite numbers")
    raise UntriedFamilyError(" ".join(reasons[0].split())[:160])


def _build(model_type: str, layers: int) -> Any:
    kind = getattr(transformers, FAMILIES[model_type])
    config = tiny_config(configuration_auto.CONFIG_MAPPING[model_type], layers)
    with torch.device("meta"):
        count = sum(item.numel() for item in kind(config).parameters())
    if count > _LARGEST:
        raise UntriedFamilyError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # what is made zero would hide an error
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model


def _inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Yield what a model may take: what its class calls its main input, alone, with an image, or as a decoder."""
    name, config = model.main_input_name, model.config
    ids = _ids(2)
    part = getattr(config, "vision_config", config)
    size = getattr(part, "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, getattr(part, "num_channels", 3) or 3, height, width, generator=generator)
    bins, length = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 32)
    found = {
        "input_ids": ids,
        "pixel_values": pixels,
        "input_values": torch.randn(2, 1600, generator=generator),
        "input_features": torch.randn(2, bins, length, generator=generator),
    }
    if name not in found:
        raise UntriedFamilyError(f"no general rule gives {name}")
    decoder = {"decoder_input_ids": _ids(2)}
    alone = {name: found[name]}
    yield alone
    yield alone | decoder
    yield {"input_ids": ids, "pixel_values": pixels}
    yield {"input_features": found["input_features"].transpose(1, 2)}


def _ids(rows: int) -> torch.Tensor:
    return torch.randint(3, 90, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def outputs_of(model: Any, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return every floating-point tensor that a model's forward pass gives, but for caches."""
    torch.manual_seed(2)
    return [
        value
        for key, value in model(**given).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and "past" not in key
    ]
