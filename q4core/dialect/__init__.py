"""What a dialect is: the mapping between a checkpoint's keys and ``PackedWeight``, in both directions.

A dialect recognises its layers from names, dtypes and shapes alone, says everything that is wrong with them, reads one
layer at a time and writes one layer at a time. Swizzled scales, key names and header metadata end here; no backend ever
sees a dialect. The two simplified dialects live in ``dialects_simple.py``; all others are plugins.
"""

from q4core.dialect.catalogue import Catalogue, LayerSchema, Problem, TensorInfo
from q4core.dialect.contract import Dialect, WrittenLayer, find_dialect
from q4core.dialect.given import require_arguments
from q4core.dialect.values import number_problems, weight_problems

__all__ = [
    "Catalogue",
    "Dialect",
    "LayerSchema",
    "Problem",
    "TensorInfo",
    "WrittenLayer",
    "find_dialect",
    "number_problems",
    "require_arguments",
    "weight_problems",
]
