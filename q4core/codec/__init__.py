"""The reference codec: the meaning of each format in plain torch, exact and deterministic, slow and clear."""

from q4core.codec.decode import dequantize

__all__ = ["dequantize"]
