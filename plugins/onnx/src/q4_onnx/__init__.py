"""Reader of ONNX files whose matrices are packed for ``MatMulNBits``, mapped and without a copy of their codes."""

from __future__ import annotations

from q4_onnx.plugin import q4_checkpoint_readers
from q4_onnx.reader import OnnxReader, OnnxSource

__all__ = ["OnnxReader", "OnnxSource", "q4_checkpoint_readers"]
