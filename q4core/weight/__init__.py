"""``PackedWeight``: the one canonical in-memory weight, for every dialect."""

from q4core.weight.concat import cat
from q4core.weight.feature import Feature
from q4core.weight.invariants import first_illegal
from q4core.weight.packed import TENSOR_FIELDS, PackedWeight
from q4core.weight.slicing import Cover
from q4core.weight.spec import WeightSpec

__all__ = ["TENSOR_FIELDS", "Cover", "Feature", "PackedWeight", "WeightSpec", "cat", "first_illegal"]
