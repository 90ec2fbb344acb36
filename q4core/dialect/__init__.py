"""What a dialect is: the mapping between a checkpoint's keys and ``PackedWeight``, in both directions.

A dialect recognises its layers from names, dtypes and shapes alone, says everything that is wrong with them, reads one
layer at a time and writes one layer at a time. Swizzled scales, key names and header metadata end here; no backend ever
sees a dialect. The two simplified dialects live in ``dialects_simple.py``; all others are plugins.
"""

from q4core.dialect.catalogue import Catalogue, LayerSchema, Problem, TensorInfo, float_dtype
from q4core.dialect.contract import Dialect, WeightFacts, WrittenLayer, find_dialect
from q4core.dialect.facts import read_fact, stored_fact
from q4core.dialect.writing import flat_bytes, is_power_of_two, row_bytes

__all__ = [
    "Catalogue",
    "Dialect",
    "LayerSchema",
    "Problem",
    "TensorInfo",
    "WeightFacts",
    "WrittenLayer",
    "find_dialect",
    "flat_bytes",
    "float_dtype",
    "is_power_of_two",
    "read_fact",
    "row_bytes",
    "stored_fact",
]
