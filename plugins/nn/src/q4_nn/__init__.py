"""Layers, decoders, text generation, conversion and training on top of ``Q4Linear``; brings ``q4 generate``."""

from __future__ import annotations

from q4_nn.attention import Attention, attend
from q4_nn.builders import architectures, build_decoder, builder
from q4_nn.cache import KVCache
from q4_nn.chat import render_chat
from q4_nn.convert import Conversion, ConversionTable, convert_linears_
from q4_nn.decoder import Block, Decoder, DecoderShape, SwiGLU
from q4_nn.generation import Generation, StopReason
from q4_nn.joined import JoinedLinear
from q4_nn.metadata import Metadata
from q4_nn.model import LanguageModel
from q4_nn.norm import RMSNorm
from q4_nn.plugin import q4_commands
from q4_nn.rope import Rotary
from q4_nn.sampling import Sampler
from q4_nn.stream import TextStream
from q4_nn.tokenizer import Tokenizer, build_tokenizer
from q4_nn.training import (
    clear_eval_cache,
    dequantize_packed,
    eval_cache_bytes,
    linear_ste,
    quantize_packed,
    ste_weight,
)
from q4_nn.weights import DenseLinear, Weights

__all__ = [
    "Attention",
    "Block",
    "Conversion",
    "ConversionTable",
    "Decoder",
    "DecoderShape",
    "DenseLinear",
    "Generation",
    "JoinedLinear",
    "KVCache",
    "LanguageModel",
    "Metadata",
    "RMSNorm",
    "Rotary",
    "Sampler",
    "StopReason",
    "SwiGLU",
    "TextStream",
    "Tokenizer",
    "Weights",
    "architectures",
    "attend",
    "build_decoder",
    "build_tokenizer",
    "builder",
    "clear_eval_cache",
    "convert_linears_",
    "dequantize_packed",
    "eval_cache_bytes",
    "linear_ste",
    "q4_commands",
    "quantize_packed",
    "render_chat",
    "ste_weight",
]
