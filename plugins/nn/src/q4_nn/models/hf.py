"""Decoders and encoders from Hugging Face directories: ``config.json`` and safetensors files, never code."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import q4core as q4
from q4_nn.models.hf_config import read_config
from q4_nn.models.hf_names import from_hf_name, fused_parts, to_hf_name
from q4_nn.models.load import Names, load_weights_
from q4_nn.models.transformer import empty_transformer

if TYPE_CHECKING:
    from q4_nn.models.transformer import Transformer
    from q4core import Session

__all__ = ["build_from_hf"]

_IGNORED = ("pooler.", "bert.pooler.", "cls.", "embeddings.position_ids", "bert.embeddings.position_ids")


def build_from_hf(folder: str | Path, session: Session) -> Transformer:
    """Build the decoder or encoder of a Hugging Face directory, whose weights may be dense or packed.

    Dense tensors become the session's ``compute_dtype``, float32 unless told: twice the bytes of a bfloat16 file.

    Args:
        folder: With ``config.json`` and safetensors files.
        session: Makes the 4-bit layers.

    Raises:
        CheckpointError: A file is missing or malformed, the kind of model is not served, a tensor is missing, has
            another shape, or has no place in the model.
    """
    folder = Path(folder)
    config = read_config(folder)
    model = empty_transformer(config)
    names = Names(
        ours=functools.partial(from_hf_name, config=config),
        theirs=functools.partial(to_hf_name, config=config),
        fused=functools.partial(fused_parts, config=config),
        ignored=_IGNORED,
    )
    with q4.open(folder) as checkpoint:
        load_weights_(model, checkpoint, session, names, str(folder))
    return model
