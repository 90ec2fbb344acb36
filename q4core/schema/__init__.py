"""Dialects, and which layers a mapping of names to tensors holds in them, with everything that is wrong.

Metadata is enough: tensors may be meta tensors or ``TensorInfo``. Each module is decided by itself, never the whole
file.
"""

from q4core.schema.catalogue import Catalogue, LayerSchema, Problem, TensorInfo
from q4core.schema.detection import MARKER, Schema, detect, detect_all, detect_in, make_catalogue
from q4core.schema.dialect import Dialect, WrittenLayer, find_dialect
from q4core.schema.given import require_arguments
from q4core.schema.simple_dialects import SIMPLE_DIALECTS, SimpleNf4, SimpleNvfp4, take_dialects_from
from q4core.schema.unread import describe_path, require_layers
from q4core.schema.validation import detect_or_fail, problems_error, validate, validate_in
from q4core.schema.values import number_problems, weight_problems

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
    "describe_path",
    "detect",
    "detect_all",
    "detect_in",
    "detect_or_fail",
    "find_dialect",
    "make_catalogue",
    "number_problems",
    "problems_error",
    "require_arguments",
    "require_layers",
    "take_dialects_from",
    "validate",
    "validate_in",
    "weight_problems",
]
