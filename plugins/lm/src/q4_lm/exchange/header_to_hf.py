"""The config of transformers' model that computes what a GGUF header says."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_lm.models.architecture import find_architecture
from q4_lm.models.gguf_rope import FACTORS, read_factors
from q4_lm.models.hf_config import config_to_hf
from q4_nn.blocks.rotary import RopeScaling
from q4core import CheckpointError, ConfigError

if TYPE_CHECKING:
    from q4_lm.models.config import TransformerConfig
    from q4_lm.models.metadata import Metadata
    from q4core import Checkpoint

__all__ = ["header_to_hf", "order_of_rows"]

_KINDS = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "qwen3moe": "qwen3_moe"}
"""Architecture → transformers' name, where it is another one."""
_SLIDING = {"llama": "mistral", "olmo2": "olmo3"}
_CLASSES = {
    "bert": "BertModel",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Transformers' kind of model → its class."""
_TOKENS = {"bos": ("bos",), "eos": ("eos", "eot", "eom"), "pad": ("padding",)}
"""Special token → the file's words for it; of several, each ends a text."""
_CONTEXTS = (8192, *(2**power for power in range(4, 21)))
_FACTORS = (8.0, 32.0, 4.0, 16.0)
"""Contexts and factors of Llama 3's scaling to try, those of its models first."""
_CLOSE = 1e-5


def header_to_hf(checkpoint: Checkpoint, metadata: Metadata) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return a model's config, as transformers has its weights, and its ``config.json``.

    Raises:
        CheckpointError: The architecture is not supported, or transformers' model of it computes something else.
    """
    architecture = find_architecture(metadata)
    kind, own = architecture.name, architecture.config(checkpoint, metadata)
    theirs = _KINDS.get(kind, kind)
    if kind == "llama" and own.num_experts:
        theirs = "mixtral"
    elif own.sliding_layers:
        theirs = _SLIDING.get(kind, theirs)
    if theirs not in _CLASSES:
        metadata.fail("general.architecture", f"one of {', '.join(sorted({*_CLASSES, *_KINDS}))}", kind)
    own = _as_theirs(checkpoint, metadata, own, kind)
    try:
        found = config_to_hf(own, theirs)
    except ConfigError as error:
        what, where = "model metadata", metadata.where
        raise CheckpointError(what, name="header", rule=str(error.rule), value=theirs, where=where) from error
    if kind == "phi3":
        found["original_max_position_embeddings"] = own.rope_scaling.original_context or own.max_position_embeddings
    for name, words in _TOKENS.items():
        numbers = [metadata.integer(f"tokenizer.ggml.{word}_token_id", low=0, default=None) for word in words]
        known = list(dict.fromkeys(number for number in numbers if number is not None))
        found[f"{name}_token_id"] = known if len(known) > 1 else next(iter(known), None)
    return own, {**found, "architectures": [_CLASSES[theirs]]}


def _as_theirs(checkpoint: Checkpoint, metadata: Metadata, own: TransformerConfig, kind: str) -> TransformerConfig:
    """Return a config of the weights as transformers has them."""
    if own.norm_position == "both":  # Gemma, whose converter adds to norms the 1 that transformers adds
        own = attrs.evolve(own, norm="offset_rms")
    if own.norm_position == "both" or kind == "granite":  # which say the scale of the scores
        own = attrs.evolve(own, attention_scale=own.attention_scale or own.head_dim**-0.5)
    if FACTORS in checkpoint.dense:
        own = attrs.evolve(own, rope_scaling=_llama3(checkpoint, metadata, own))
    if own.rope_dim != own.head_dim and kind != "phi3":
        key, rule = f"{kind}.rope.dimension_count", f"{own.head_dim}, as transformers turns the whole head"
        metadata.fail(key, rule, own.rope_dim)
    return own


def order_of_rows(config: TransformerConfig, module: str, count: int) -> torch.Tensor | None:
    """Return the order of a layer's rows in which a pair's members are half a head apart; None as they are."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = module.rpartition(".")[2]
    if not config.rope_interleaved or part not in heads:
        return None
    return torch.arange(count).view(heads[part], -1, 2).transpose(1, 2).reshape(-1)


def _llama3(checkpoint: Checkpoint, metadata: Metadata, own: TransformerConfig) -> RopeScaling:
    """Return the scaling of Llama 3 whose divisors of the frequencies a file has, as it does not say the scaling.

    Raises:
        CheckpointError: There is none.
    """
    divisors = read_factors(checkpoint, metadata, FACTORS, own.rope_dim)
    plain = RopeScaling().frequencies(own.rope_dim, own.rope_theta, 1)
    greatest = round(float(divisors.max()), 3)
    for context, factor in itertools.product(_CONTEXTS, (*_FACTORS, greatest)):
        scaling = RopeScaling(kind="llama3", factor=factor, original_context=context)
        found = plain / scaling.frequencies(own.rope_dim, own.rope_theta, 1)
        if own.rope_scaling == RopeScaling() and torch.allclose(found, divisors, rtol=_CLOSE, atol=0):
            return scaling
    rule = "the divisors of a scaling of Llama 3, which is all that transformers computes of it"
    return metadata.fail_tensor(FACTORS, rule, f"up to {greatest:g}")
