"""Which layers a mapping of names to tensors holds, in which dialects, and everything that is wrong with them.

Metadata is enough: tensors may be meta tensors or ``TensorInfo``. Each module is decided by itself, never the whole
file.
"""

from q4core.schema.detection import MARKER, Schema, detect, detect_all, detect_in, make_catalogue
from q4core.schema.unread import describe_path, require_layers
from q4core.schema.validation import detect_or_fail, problems_error, validate, validate_in

__all__ = [
    "MARKER",
    "Schema",
    "describe_path",
    "detect",
    "detect_all",
    "detect_in",
    "detect_or_fail",
    "make_catalogue",
    "problems_error",
    "require_layers",
    "validate",
    "validate_in",
]
