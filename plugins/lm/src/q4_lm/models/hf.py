"""Decoders and encoders from Hugging Face directories: ``config.json`` and safetensors files, never code."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4_lm.models.hf_config import config_from_hf
from q4_lm.models.hf_names import from_hf_name, fused_parts, to_hf_name
from q4_lm.models.load import Names, load_weights_
from q4_lm.models.transformer import empty_transformer
from q4core import CheckpointError, PackedWeight
from q4core.plugin_api import warn_once

if TYPE_CHECKING:
    from q4_lm.models.config import TransformerConfig
    from q4_lm.models.transformer import Transformer
    from q4core import Checkpoint, Session

__all__ = ["IGNORED", "build_from_hf", "has_other_head"]

IGNORED = ("pooler.", "bert.pooler.", "cls.", "embeddings.position_ids", "bert.embeddings.position_ids")
"""Beginnings of names that no model here needs."""
_HEADS = ("classifier.", "decoder.", "head.", "lm_head.")
"""Of an encoder: heads that are no part of it."""


def build_from_hf(folder: str | Path, session: Session) -> Transformer:
    """Build the decoder or encoder of a Hugging Face directory, whose weights may be dense or packed.

    Dense tensors become the session's ``compute_dtype``, float32 by default: twice the bytes of a bfloat16 file. A head
    that differs from the embedding is used though the config ties them, as transformers 5 does, with one ``Q4Warning``.

    Args:
        folder: With ``config.json`` and safetensors files.
        session: Makes the 4-bit layers.

    Raises:
        CheckpointError: A file is missing or malformed, the kind of model is not supported, a tensor is missing, has
            another shape, or has no place in the model.
    """
    folder = Path(folder)
    config = config_from_hf(folder)
    if config.attention_sinks:
        rule, hint = "of a model whose folder is read", "GPT-OSS is read from GGUF files, or by q4_transformers.load."
        raise CheckpointError(
            "model config", name="model_type", rule=rule, value="gpt_oss", where=str(folder), hint=hint
        )
    with q4.open(folder) as checkpoint:
        if config.causal and config.tie_word_embeddings and has_other_head(checkpoint, config):
            what = f"the head of {folder}: config.json says tie_word_embeddings, but its weights are not those of the "
            what += "embedding. Both are used as they are stored; set tie_word_embeddings to false in config.json."
            warn_once(str(folder), q4.Q4Warning, what)
            config = attrs.evolve(config, tie_word_embeddings=False)
        model = empty_transformer(config)
        names = Names(
            ours=functools.partial(from_hf_name, config=config),
            theirs=functools.partial(to_hf_name, config=config),
            fused=functools.partial(fused_parts, config=config),
            ignored=IGNORED if config.causal else IGNORED + _HEADS,
        )
        load_weights_(model, checkpoint, session, names, str(folder))
    return model


def has_other_head(checkpoint: Checkpoint, config: TransformerConfig) -> bool:
    """Return whether a file holds both embedding and head, with different values."""
    found: dict[str, Any] = {}
    for name in (*checkpoint, *checkpoint.dense):
        ours = from_hf_name(name, config).removesuffix(".weight")
        if ours in {"embed_tokens", "lm_head"}:
            found[ours] = checkpoint[name] if name in checkpoint else checkpoint.dense[name]
    embedding, head = found.get("embed_tokens"), found.get("lm_head")
    if embedding is None or head is None:
        return False
    return not _is_equal(embedding, head)


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two matrices hold the same; one that is packed and one that is dense do not."""
    if isinstance(one, PackedWeight) and isinstance(other, PackedWeight):
        if (one.format, one.packing) != (other.format, other.packing):
            return False
        return all(
            name == again and _is_equal(tensor, twin)
            for (name, tensor), (again, twin) in zip(one.tensors(), other.tensors(), strict=False)
        )
    if isinstance(one, PackedWeight) or isinstance(other, PackedWeight):
        return False
    return torch.equal(one, other) if one.dtype == other.dtype else torch.equal(one.double(), other.double())
