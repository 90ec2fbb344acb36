"""Layers, conversion and training on top of ``Q4Linear``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_nn.blocks.attention import MultiHeadAttention
from q4_nn.blocks.cache import KVCache
from q4_nn.blocks.embedding import PackedEmbedding
from q4_nn.blocks.feed_forward import FeedForward
from q4_nn.blocks.joined import JoinedLinear
from q4_nn.blocks.norm import OffsetRMSNorm, RMSNorm
from q4_nn.blocks.packed import FilledLinear, Q4Conv2d, Q4Recurrent
from q4_nn.blocks.rotary import RopeScaling, RotaryEmbedding
from q4_nn.convert.replacing import convert_linears_
from q4_nn.convert.table import Conversion, ConversionTable
from q4_nn.layer_type import LayerExample, LayerType, layer_types, make
from q4_nn.plugin import q4_layers
from q4_nn.registry.builders import build_cnn, build_mlp, build_rnn
from q4_nn.registry.description import build, describe
from q4_nn.registry.initialise import initialise_
from q4_nn.saved import load_model, save_model
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
from q4core.moved import getattr_of

__all__ = [
    "Conversion",
    "ConversionTable",
    "Costs",
    "EarlyStop",
    "FeedForward",
    "FilledLinear",
    "JoinedLinear",
    "KVCache",
    "LayerCost",
    "LayerExample",
    "LayerType",
    "MultiHeadAttention",
    "OffsetRMSNorm",
    "PackedEmbedding",
    "Q4Conv2d",
    "Q4Recurrent",
    "RMSNorm",
    "RopeScaling",
    "RotaryEmbedding",
    "STEConv2d",
    "STELinear",
    "STERecurrent",
    "State",
    "Trainer",
    "TrainingError",
    "build",
    "build_cnn",
    "build_mlp",
    "build_rnn",
    "clear_eval_cache",
    "convert_linears_",
    "dequantize_packed",
    "describe",
    "eval_cache_bytes",
    "initialise_",
    "instrument",
    "layer_types",
    "linear_ste",
    "load_model",
    "make",
    "pack_",
    "q4_layers",
    "quantize_packed",
    "save_model",
    "ste_weight",
    "to_ste_",
]

_TO_LM = (
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
    "generate_batch",
    "measure_perplexity",
    "render_chat",
    "stream_text",
)
_TO_PROGRAMS = ("EmissionError", "NetworkProgram", "ProgramBuilder", "Value", "make_program")

if not TYPE_CHECKING:  # for a checker, a name that is not here stays an error
    __getattr__ = getattr_of(__name__, dict.fromkeys(_TO_LM, "q4_lm") | dict.fromkeys(_TO_PROGRAMS, "q4_programs"))
