"""Reader and writer of GGUF files; reading maps them, without a copy."""

from __future__ import annotations

from q4_gguf.forms import form_of
from q4_gguf.header import Header, TensorEntry, read_header
from q4_gguf.plugin import q4_checkpoint_readers, q4_checkpoint_writers
from q4_gguf.reader import GgufReader, GgufSource
from q4_gguf.values import ArrayValue, TypedFloat, TypedInt
from q4_gguf.writer import GgufWriter

__all__ = [
    "ArrayValue",
    "GgufReader",
    "GgufSource",
    "GgufWriter",
    "Header",
    "TensorEntry",
    "TypedFloat",
    "TypedInt",
    "form_of",
    "q4_checkpoint_readers",
    "q4_checkpoint_writers",
    "read_header",
]
