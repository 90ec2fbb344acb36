"""4-bit formats: codebooks, scale kinds, nibble packing, dtypes."""

from q4core.formats.packing import NibbleOrder, Packing, as_bytes, cat_stored, pack_codes, same_bytes, unpack_codes
from q4core.formats.table import (
    BUILTIN_FORMATS,
    FLOATS,
    BlockOrder,
    Form,
    Format,
    ScaleKind,
    find_format,
    resolve_levels,
)

__all__ = [
    "BUILTIN_FORMATS",
    "FLOATS",
    "BlockOrder",
    "Form",
    "Format",
    "NibbleOrder",
    "Packing",
    "ScaleKind",
    "as_bytes",
    "cat_stored",
    "find_format",
    "pack_codes",
    "resolve_levels",
    "same_bytes",
    "unpack_codes",
]
