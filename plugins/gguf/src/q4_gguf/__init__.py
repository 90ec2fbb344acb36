"""Reader of GGUF files, mapped and without a copy."""

from __future__ import annotations

from q4_gguf.header import Header, TensorEntry, read_header
from q4_gguf.plugin import q4_checkpoint_readers
from q4_gguf.reader import GgufReader, GgufSource
from q4_gguf.values import ArrayValue

__all__ = [
    "ArrayValue",
    "GgufReader",
    "GgufSource",
    "Header",
    "TensorEntry",
    "q4_checkpoint_readers",
    "read_header",
]
