"""The tolerances in the code are those of the page that derives them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from q4_conformance.checks import device
from q4_conformance.checks.lifetime import LOST_LAYERS
from q4_conformance.checks.steady import LOST_PER_THREAD, LOST_RESULTS
from q4_conformance.measurement import allocations, dense_check
from q4_conformance.oracle import exact

judge = importlib.import_module("q4_conformance.oracle.compare")  # the package exports the function of that name
PAGE = Path(__file__).parents[2] / "docs" / "tolerances.md"
ROW = re.compile(r"^\| (?P<name>[^|]+?) \| (?P<value>[-0-9^/.]+) \| (?P<why>.+) \|$")
IN_CODE = {
    "unit roundoff": judge._UNIT_ROUNDOFF,
    "extra steps": exact._EXTRA_STEPS,
    "underflow": judge._UNDERFLOW,
    "bits of float32": judge._PRECISION_BITS[torch.float32],
    "bits of bfloat16": judge._PRECISION_BITS[torch.bfloat16],
    "bits of float16": judge._PRECISION_BITS[torch.float16],
    "lowest exponent of float32": judge._LOWEST_EXPONENT[torch.float32],
    "lowest exponent of bfloat16": judge._LOWEST_EXPONENT[torch.bfloat16],
    "lowest exponent of float16": judge._LOWEST_EXPONENT[torch.float16],
    **{
        f"weight roundoff of {str(dtype).removeprefix('torch.')}": relative
        for dtype, (relative, _) in exact._ROUNDING.items()
    },
    "noise allowance": judge._NOISE_ALLOWANCE,
    "block of a scale": judge._BLOCK,
    "draws by chance": device._DRAWS,
    "one mean": device._MOST_ONE,
    "all means": device._MOST_ALL,
    "least variance": device._NORMAL,
    "lost results": LOST_RESULTS,
    "lost per thread": LOST_PER_THREAD,
    "lost layers": LOST_LAYERS,
    "dense elements": dense_check.DENSE_ELEMENTS,
    "dense bytes": dense_check.DENSE_BYTES,
    "prepared bytes": dense_check.PREPARED_BYTES,
    "other bytes": dense_check.OTHER_BYTES,
    "over half sides": dense_check.OVER_HALF_SIDES,
    "elements of activations": dense_check.ACTIVATION_ELEMENTS,
    "bytes of activations": dense_check.ACTIVATION_BYTES,
    "least limit": dense_check.LEAST_BYTES,
    "calls": dense_check.CALLS,
    "large block": allocations.LARGE_BYTES,
}


def _value(text: str) -> float:
    if "^" in text:
        base, exponent = text.split("^")
        return float(base) ** int(exponent)
    if "/" in text:
        part, whole = text.split("/")
        return int(part) / int(whole)
    return float(text)


DERIVED = {
    found["name"]: _value(found["value"])
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if (found := ROW.match(line.replace("\\|", "!")))
}


def test_every_tolerance_is_derived_and_every_derivation_used() -> None:
    """The page and the code name the same tolerances."""
    assert set(DERIVED) == set(IN_CODE)


@pytest.mark.parametrize("name", sorted(IN_CODE))
def test_number_is_the_pages(name: str) -> None:
    """The number in the code is the one on the page."""
    assert IN_CODE[name] == DERIVED[name]


def test_constants_follow_from_the_dtypes() -> None:
    """Roundoff, smallest number, significands and exponents are torch's own facts of the dtypes."""
    info = torch.finfo(torch.float32)
    assert info.eps / 2 == judge._UNIT_ROUNDOFF
    assert info.smallest_normal * info.eps == judge._UNDERFLOW
    for dtype, bits in judge._PRECISION_BITS.items():
        facts = torch.finfo(dtype)
        assert facts.eps == 2.0 ** (1 - bits)
        assert facts.smallest_normal == 2.0 ** judge._LOWEST_EXPONENT[dtype]
