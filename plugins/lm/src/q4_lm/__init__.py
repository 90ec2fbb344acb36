"""Language models on top of ``q4_nn``: from files to text, and the commands of ``q4 generate``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from q4_lm.generation.batch import generate_batch
    from q4_lm.generation.conversation import Conversation, stream_text
    from q4_lm.generation.language_model import LanguageModel
    from q4_lm.generation.perplexity import Perplexity, measure_perplexity
    from q4_lm.generation.run import Generation, StopReason
    from q4_lm.generation.sampling import Sampler
    from q4_lm.generation.sentence_encoder import SentenceEncoder
    from q4_lm.generation.stream import TextStream
    from q4_lm.models.architecture import Architecture, architectures, build_decoder, config_from_gguf
    from q4_lm.models.config import TransformerConfig
    from q4_lm.models.hf_config import config_from_hf, config_to_hf
    from q4_lm.models.load import Names
    from q4_lm.models.metadata import Metadata
    from q4_lm.models.saved import load_model, save_model
    from q4_lm.models.transformer import TransformerBlock, TransformerDecoder, TransformerEncoder, build_transformer
    from q4_lm.tokenizers.chat import render_chat
    from q4_lm.tokenizers.tokenizer import Tokenizer
    from q4_lm.tokenizers.vocabulary import build_tokenizer

__all__ = [
    "Architecture",
    "Conversation",
    "Generation",
    "LanguageModel",
    "Metadata",
    "Names",
    "Perplexity",
    "Sampler",
    "SentenceEncoder",
    "StopReason",
    "TextStream",
    "Tokenizer",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerDecoder",
    "TransformerEncoder",
    "architectures",
    "build_decoder",
    "build_tokenizer",
    "build_transformer",
    "config_from_gguf",
    "config_from_hf",
    "config_to_hf",
    "generate_batch",
    "load_model",
    "measure_perplexity",
    "render_chat",
    "save_model",
    "stream_text",
]

_HOMES = {
    "generation.batch": "generate_batch",
    "generation.conversation": "Conversation stream_text",
    "generation.language_model": "LanguageModel",
    "generation.perplexity": "Perplexity measure_perplexity",
    "generation.run": "Generation StopReason",
    "generation.sampling": "Sampler",
    "generation.sentence_encoder": "SentenceEncoder",
    "generation.stream": "TextStream",
    "models.architecture": "Architecture architectures build_decoder config_from_gguf",
    "models.config": "TransformerConfig",
    "models.hf_config": "config_from_hf config_to_hf",
    "models.load": "Names",
    "models.metadata": "Metadata",
    "models.saved": "load_model save_model",
    "models.transformer": "TransformerBlock TransformerDecoder TransformerEncoder build_transformer",
    "tokenizers.chat": "render_chat",
    "tokenizers.tokenizer": "Tokenizer",
    "tokenizers.vocabulary": "build_tokenizer",
}
"""Module → the names of it that are public here; imported when one is asked for, so that commands start at once."""

if not TYPE_CHECKING:  # for a checker, a name that is not here stays an error

    def __getattr__(name: str) -> Any:
        home = next((module for module, names in _HOMES.items() if name in names.split()), None)
        if home is None:
            what = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(what)
        found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
