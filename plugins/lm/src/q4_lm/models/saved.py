"""Models in files: GGUF, Hugging Face folders, and folders of our own, which restore every bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import q4core as q4
from q4_lm.models.architecture import build_model
from q4_lm.models.config import TransformerConfig
from q4_lm.models.hf import build_from_hf
from q4_lm.models.metadata import Metadata
from q4_lm.models.read_json import read_json
from q4_lm.models.transformer import TransformerDecoder, TransformerEncoder, empty_transformer
from q4_nn import load_model as load_described
from q4_nn import save_model as save_described
from q4_nn.saved import KIND, read_folder, write_folder

if TYPE_CHECKING:
    import os

    from torch import nn

__all__ = ["load_model", "save_model"]


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a model to a folder, from which ``load_model`` makes the same one; whole, or not at all.

    Args:
        model: A decoder or an encoder, or a model that ``q4_nn.save_model`` takes. Float layers keep their dtype,
            packed ones their bytes: codes, scales and layout.
        folder: Where; files of an older model there are replaced.

    Returns:
        The safetensors file.

    Raises:
        ConfigError: The model is none of these.
        InputError: A layer trains in four bits, but the config or description does not say so.
        CheckpointError: The model was changed beyond what they say, or the files can't be written.
    """
    if not isinstance(model, (TransformerDecoder, TransformerEncoder)):
        return save_described(model, folder)
    return write_folder(model, empty_transformer(model.config), {"config": model.config.to_dict()}, folder)


def load_model(path: str | os.PathLike[str], session: q4.Session | None = None) -> nn.Module:
    """Build the model that a file or folder holds, in evaluation mode; a tokenizer is not needed.

    Args:
        path: A GGUF file, a folder in Hugging Face's form, or one of ``save_model``'s. Dense tensors become the
            session's ``compute_dtype``; without one they become float32, and those of ours what they were.
        session: Makes the packed layers. Defaults to the default session.

    Returns:
        ``TransformerDecoder`` or ``TransformerEncoder``, or the ``nn.Sequential`` of a description.

    Raises:
        CheckpointError: A file is missing or malformed, the kind of model is not supported, or tensors are missing, not
            expected, or of another shape; it names them.
        ConfigError: A value of ``config.json`` is not legal.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: No backend can run a layer.
    """
    session = q4.default_session() if session is None else session
    if not Path(path).is_dir():
        with q4.open(path) as checkpoint:
            return build_model(checkpoint, session, Metadata(checkpoint.metadata, str(path)))
    facts = read_json(Path(path) / "config.json")
    if facts.get("model_type") != KIND:
        return build_from_hf(Path(path), session)
    if not isinstance(facts.get("config"), dict):
        return load_described(path, session)
    return read_folder(path, empty_transformer(TransformerConfig.from_dict(facts["config"])), session)
