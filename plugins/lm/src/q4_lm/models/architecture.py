"""Architectures: builders of models from GGUF files; plugins add further ones by the hook ``q4_architectures``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import attrs

from q4_lm.models.load import load_weights_
from q4_lm.models.metadata import Metadata
from q4_lm.models.transformer import TransformerDecoder, empty_transformer
from q4core import CheckpointError, default_registry
from q4core import open as open_checkpoint
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from q4_lm.models.config import TransformerConfig
    from q4_lm.models.load import Names
    from q4_lm.models.transformer import Transformer
    from q4core import Checkpoint, Session

__all__ = ["Architecture", "architectures", "build_decoder", "build_model", "config_from_gguf", "find_architecture"]


def _nothing(*_: object) -> None:
    """Change nothing in a decoder."""


@attrs.frozen
class Architecture:
    """A builder of decoders, or of encoders, from model files.

    Args:
        name: Value of ``general.architecture``.
        config: The opened file and its metadata → the model's config.
        names: That config → what the file calls the parts.
        finish: Called with the filled decoder, the file and its metadata, for what is neither matrix nor norm.
        to_folder: The opened file → what ``q4 convert`` writes as a Hugging Face folder, in the form of
            ``q4_lm.exchange``'s ``HfFolder``; None where there is no such form.
        from_folder: The opened folder and its path → what ``q4 convert`` writes as a GGUF file, a ``GgufModel``.
        is_storable: Whether a prepared model's file has all that ``finish`` changes, so that models are cached.
    """

    name: str
    config: Callable[[Checkpoint, Metadata], TransformerConfig]
    names: Callable[[TransformerConfig], Names]
    finish: Callable[[TransformerDecoder, Checkpoint, Metadata], None] = _nothing
    to_folder: Callable[[Checkpoint], Any] | None = None
    from_folder: Callable[[Checkpoint, Path], Any] | None = None
    is_storable: bool = False


def architectures() -> Mapping[str, Architecture]:
    """Return every architecture by name, those of all plugins."""
    return default_registry().items("q4_architectures")


def find_architecture(metadata: Metadata) -> Architecture:
    """Return a model file's architecture.

    Raises:
        CheckpointError: The file names none, or one that no plugin adds.
    """
    if "general.architecture" not in metadata:
        what = "the checkpoint does not say which model its layers make up"
        hint = "A GGUF file says it. For safetensors name the folder, with config.json and tokenizer.json next to the "
        hint += "weights; transformers' save_pretrained(FOLDER) of model and tokenizer writes one."
        raise CheckpointError(what, where=metadata.where, hint=hint)
    name: str = metadata.text("general.architecture")
    known = architectures()
    if name not in known:
        close = closest_name(name, known)
        hint = f"Did you mean {close!r}?" if close else "A plugin can add it, by the hook q4_architectures."
        metadata.fail("general.architecture", f"one of {', '.join(sorted(known))}", name, hint)
    return known[name]


def config_from_gguf(path: str | os.PathLike[str]) -> TransformerConfig:
    """Return the config of a GGUF file's model; only its header is read.

    Raises:
        CheckpointError: The file is malformed, or holds a model that is not supported.
    """
    with open_checkpoint(path) as checkpoint:
        metadata = Metadata(checkpoint.metadata, os.fspath(path))
        return find_architecture(metadata).config(checkpoint, metadata)


def build_model(
    checkpoint: Checkpoint, session: Session, metadata: Metadata, config: TransformerConfig | None = None
) -> Transformer:
    """Build the decoder or encoder that an opened file holds.

    Args:
        checkpoint: The opened file.
        session: Makes the 4-bit layers.
        metadata: The file's metadata.
        config: What the architecture reads of them, where it is known.

    Raises:
        CheckpointError: The architecture is not known, a metadata value or a tensor is missing or contradicts the
            others, or there is a tensor that the architecture does not know.
        ConfigError: The session's device is not available.
    """
    architecture = find_architecture(metadata)
    config = config or architecture.config(checkpoint, metadata)
    model = empty_transformer(config)
    load_weights_(model, checkpoint, session, architecture.names(config), metadata.where)
    if isinstance(model, TransformerDecoder):
        architecture.finish(model, checkpoint, metadata)
    return model


def build_decoder(
    checkpoint: Checkpoint, session: Session, metadata: Metadata, config: TransformerConfig | None = None
) -> TransformerDecoder:
    """Build the decoder that an opened file holds; arguments and errors are ``build_model``'s.

    Raises:
        CheckpointError: The file holds an encoder.
    """
    architecture = find_architecture(metadata)
    config = config or architecture.config(checkpoint, metadata)
    if not config.causal:
        hint = "SentenceEncoder.open reads encoders."
        metadata.fail("general.architecture", "a decoder's; an encoder gives no text", architecture.name, hint)
    return cast("TransformerDecoder", build_model(checkpoint, session, metadata, config))
