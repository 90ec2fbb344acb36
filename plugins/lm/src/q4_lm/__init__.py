"""Language models on top of ``q4_nn``: from files to text, and the commands of ``q4 generate``."""

from __future__ import annotations

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
from q4_lm.plugin import q4_architectures, q4_commands, q4_layers
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
    "q4_architectures",
    "q4_commands",
    "q4_layers",
    "render_chat",
    "save_model",
    "stream_text",
]
