"""Dialects, the layers that a mapping of names to tensors holds in them, and everything that is wrong with these.

Metadata is enough: tensors may be meta tensors or ``TensorInfo``. Each module is decided by itself, never the whole
file.
"""

from q4core.schema.catalogue import Catalogue, LayerSchema, Problem, TensorInfo, require_arguments
from q4core.schema.detection import MARKER, Schema, catalogue_of, countable, detect_in, readings
from q4core.schema.dialect import Dialect, WrittenLayer, dialect_of, find_dialect
from q4core.schema.simple_dialects import SIMPLE_DIALECTS, SimpleNf4, SimpleNvfp4
from q4core.schema.validation import problems_error, validate_in

__all__ = [
    "MARKER",
    "SIMPLE_DIALECTS",
    "Catalogue",
    "Dialect",
    "LayerSchema",
    "Problem",
    "Schema",
    "SimpleNf4",
    "SimpleNvfp4",
    "TensorInfo",
    "WrittenLayer",
    "catalogue_of",
    "countable",
    "detect_in",
    "dialect_of",
    "find_dialect",
    "problems_error",
    "readings",
    "require_arguments",
    "validate_in",
]
