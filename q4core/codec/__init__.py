"""The reference codec: what each format means, in plain torch, exact and deterministic, slow and clear."""

from q4core.codec.decode import decode_rows, dequantize

__all__ = ["decode_rows", "dequantize"]
