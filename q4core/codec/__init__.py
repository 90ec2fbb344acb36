"""The reference codec: the meaning of each format in plain torch, exact and deterministic, slow and clear."""

from q4core.codec.decode import decode_rows, dequantize

__all__ = ["decode_rows", "dequantize"]
