"""``load``: model and tokenizer of a folder in one call; ``config_for``: the same by transformers' public API."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

import q4core as q4
from q4_lm import Metadata
from q4_lm.exchange.vocabulary_to_hf import tokenizer_parts
from q4_transformers.config import Q4Config
from q4core import CheckpointError, ConfigError

if TYPE_CHECKING:
    import os

__all__ = ["config_for", "load"]

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt")


def config_for(path: str | os.PathLike[str], config: Q4Config | None = None) -> Any:
    """Return a folder's ``AutoConfig`` such that ``from_pretrained(path, config=…)`` loads it by q4core.

    It changes nothing in transformers, also where the folder's own entry names another library.

    Args:
        path: A model's folder.
        config: What to ask for.

    Raises:
        ConfigError: ``config`` is something else.
    """
    asked = _asked("config_for", config)
    found = transformers.AutoConfig.from_pretrained(path)
    found.quantization_config = asked.to_dict()
    return found


def load(
    path: str | os.PathLike[str],
    config: Q4Config | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer, packed as the checkpoint stores it.

    Args:
        path: A model's folder, or a GGUF file.
        config: What to ask for; ``Q4Config(format="nf4")`` quantises a dense checkpoint.
        cache: In place of the configuration's ``cache``: ``"auto"``, ``"off"`` or a folder.
        options: For ``from_pretrained``, such as ``dtype`` and ``device_map``.

    Returns:
        The model, of the class that ``config.json`` or the GGUF file names, and its tokenizer; None where the folder or
        file has none.

    Raises:
        CheckpointError: The folder is not there, or names no model class of transformers; or a GGUF file is of an
            architecture that is not supported, or has a vocabulary that is not read.
        ConfigError, SchemaError: What is asked for, or the checkpoint, does not fit; raised before anything is loaded.
    """
    folder, asked = Path(path), _asked("q4_transformers.load", config)
    if cache is not None:
        asked.cache = Q4Config(cache=cache).cache
    if folder.suffix == ".gguf" and folder.is_file():
        return _load_gguf(folder, asked, options)
    if not folder.is_dir():
        rule, hint = "a model's folder or a GGUF file", "Download the model first; its folder has a config.json."
        raise CheckpointError("q4_transformers.load", name="path", rule=rule, value=str(folder), hint=hint)
    found = config_for(folder, asked)
    names = list(found.architectures or ())
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        rule = "the name of a model class of transformers"
        what, where = "config.json", str(folder / "config.json")
        raise CheckpointError(what, name="architectures", rule=rule, value=names, where=where)
    model = kind.from_pretrained(folder, config=found, **options)
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    return model, transformers.AutoTokenizer.from_pretrained(folder) if has_tokenizer else None


def _asked(what: str, config: Q4Config | None) -> Q4Config:
    """Return a copy of the requested config, or the default; a ``ConfigError`` rejects anything else."""
    if config is not None and not isinstance(config, Q4Config):
        raise ConfigError(what, name="config", rule="a Q4Config or None", value=type(config).__name__)
    return Q4Config() if config is None else copy.copy(config)


def _load_gguf(path: Path, config: Q4Config, options: dict[str, Any]) -> tuple[Any, Any]:
    """Load a GGUF file; see ``load``."""
    from q4_transformers.gguf import open_gguf  # noqa: PLC0415  # transformers' tables are not everybody's

    if config.format is not None:
        rule, hint = "None for a GGUF file, whose weights are taken as they are stored", "Leave format= away."
        raise ConfigError("q4_transformers.load", name="format", rule=rule, value=config.format, hint=hint)
    found, kind, config.gguf, state = open_gguf(path, config.modules_to_not_convert or ())
    tokenizer = _tokenizer_of(path)
    if not hasattr(found, "num_key_value_heads"):  # an encoder, whose file has no pooler
        options = {"add_pooling_layer": False, **options}
    model = kind.from_pretrained(None, config=found, state_dict=state, quantization_config=config, **options)
    return model, tokenizer


def _tokenizer_of(path: Path) -> Any:
    """Return the tokenizer of a GGUF file, which gives q4_lm's tokens, or None where the file has none."""
    with q4.open(path) as checkpoint:
        metadata = Metadata(checkpoint.metadata, str(path))
    if "tokenizer.ggml.model" not in metadata:
        return None
    engine, facts = tokenizer_parts(metadata)
    del facts["add_bos_token"]  # which the engine does
    template = facts.pop("chat_template", None)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **facts)
    found.chat_template = template
    return found
