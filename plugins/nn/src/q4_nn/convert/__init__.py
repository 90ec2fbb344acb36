"""``convert_linears_``: quantise the linear layers of any ``nn.Module``, in place."""

from __future__ import annotations

from q4_nn.convert.replacing import convert_linears_
from q4_nn.convert.table import Conversion, ConversionTable

__all__ = ["Conversion", "ConversionTable", "convert_linears_"]
