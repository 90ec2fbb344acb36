"""Layers, decoders, text generation, conversion and training on top of ``Q4Linear``; brings ``q4 generate``."""

from __future__ import annotations

from q4_nn.blocks.attention import MultiHeadAttention
from q4_nn.blocks.cache import KVCache
from q4_nn.blocks.feed_forward import FeedForward
from q4_nn.blocks.joined import JoinedLinear
from q4_nn.blocks.norm import OffsetRMSNorm
from q4_nn.blocks.packed import FilledLinear, Q4Conv2d, Q4Recurrent
from q4_nn.blocks.rotary import RopeScaling, RotaryEmbedding
from q4_nn.convert.replacing import convert_linears_
from q4_nn.convert.table import Conversion, ConversionTable
from q4_nn.generation.batch import generate_batch
from q4_nn.generation.chat import render_chat
from q4_nn.generation.conversation import Conversation, stream_text
from q4_nn.generation.language_model import LanguageModel
from q4_nn.generation.perplexity import Perplexity, measure_perplexity
from q4_nn.generation.run import Generation, StopReason
from q4_nn.generation.sampling import Sampler
from q4_nn.generation.sentence_encoder import SentenceEncoder
from q4_nn.generation.stream import TextStream
from q4_nn.generation.tokenizer import Tokenizer, build_tokenizer
from q4_nn.models.architecture import Architecture, architectures, build_decoder
from q4_nn.models.config import TransformerConfig
from q4_nn.models.initialise import initialise_
from q4_nn.models.load import Names
from q4_nn.models.metadata import Metadata
from q4_nn.models.saved import load_model, save_model
from q4_nn.models.transformer import PackedEmbedding, TransformerBlock, TransformerDecoder, TransformerEncoder
from q4_nn.plugin import q4_architectures, q4_commands, q4_layers
from q4_nn.programs.builder import EmissionError, ProgramBuilder, Value
from q4_nn.programs.network import NetworkProgram, make_program
from q4_nn.registry.builders import build_cnn, build_mlp, build_rnn, build_transformer
from q4_nn.registry.description import build, describe
from q4_nn.registry.layer_type import LayerExample, LayerType, layer_types, make
from q4_nn.trainer.instrument import Costs, LayerCost, instrument
from q4_nn.trainer.loop import Trainer, TrainingError
from q4_nn.trainer.state import EarlyStop, State
from q4_nn.training import (
    STEConv2d,
    STELinear,
    STERecurrent,
    clear_eval_cache,
    dequantize_packed,
    eval_cache_bytes,
    linear_ste,
    pack_,
    quantize_packed,
    ste_weight,
    to_ste_,
)

__all__ = [
    "Architecture",
    "Conversation",
    "Conversion",
    "ConversionTable",
    "Costs",
    "EarlyStop",
    "EmissionError",
    "FeedForward",
    "FilledLinear",
    "Generation",
    "JoinedLinear",
    "KVCache",
    "LanguageModel",
    "LayerCost",
    "LayerExample",
    "LayerType",
    "Metadata",
    "MultiHeadAttention",
    "Names",
    "NetworkProgram",
    "OffsetRMSNorm",
    "PackedEmbedding",
    "Perplexity",
    "ProgramBuilder",
    "Q4Conv2d",
    "Q4Recurrent",
    "RopeScaling",
    "RotaryEmbedding",
    "STEConv2d",
    "STELinear",
    "STERecurrent",
    "Sampler",
    "SentenceEncoder",
    "State",
    "StopReason",
    "TextStream",
    "Tokenizer",
    "Trainer",
    "TrainingError",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerDecoder",
    "TransformerEncoder",
    "Value",
    "architectures",
    "build",
    "build_cnn",
    "build_decoder",
    "build_mlp",
    "build_rnn",
    "build_tokenizer",
    "build_transformer",
    "clear_eval_cache",
    "convert_linears_",
    "dequantize_packed",
    "describe",
    "eval_cache_bytes",
    "generate_batch",
    "initialise_",
    "instrument",
    "layer_types",
    "linear_ste",
    "load_model",
    "make",
    "make_program",
    "measure_perplexity",
    "pack_",
    "q4_architectures",
    "q4_commands",
    "q4_layers",
    "quantize_packed",
    "render_chat",
    "save_model",
    "ste_weight",
    "stream_text",
    "to_ste_",
]
