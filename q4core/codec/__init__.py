"""The reference codec: what each format means, in plain torch, exact and deterministic, slow and clear."""

from q4core.codec.checks import check_dense, check_finite
from q4core.codec.decode import decode_rows, dequantize
from q4core.codec.encode import quantize

__all__ = ["check_dense", "check_finite", "decode_rows", "dequantize", "quantize"]
