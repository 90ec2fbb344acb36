"""A truncated shared segment is a typed error for later and for waiting calls."""

from __future__ import annotations

import pytest
from truncation import SIZES, ends_after_truncation

from q4_actors import MutableMode


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MutableMode)
def test_truncated_segment_is_refused(mode: MutableMode, size: int) -> None:
    """Each use raises with the size, at every try, also in a forked child; every handle can still be closed."""
    ends, told = ends_after_truncation(mode, size)
    assert len(ends) == 32 + 2 * (mode is MutableMode.IN_PLACE)
    assert not {name: code for name, code in ends.items() if code}, told
