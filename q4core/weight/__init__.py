"""``PackedWeight``: the one canonical in-memory weight, whatever dialect it was read from."""

from q4core.weight.feature import Feature
from q4core.weight.invariants import first_illegal
from q4core.weight.joining import cat
from q4core.weight.packed import TENSOR_FIELDS, PackedWeight

__all__ = ["TENSOR_FIELDS", "Feature", "PackedWeight", "cat", "first_illegal"]
