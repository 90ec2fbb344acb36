"""With how many rows a path is probed."""

from __future__ import annotations

import attrs

from q4core.selection.probe_results import row_counts
from tests.support.fakes import KERNEL_PATH

SMALL = attrs.evolve(KERNEL_PATH, m=(1, 100))


def test_row_counts_of_a_range() -> None:
    """An open end is looked at 16 rows above the lower one, a far one at 128 rows."""
    assert row_counts(KERNEL_PATH, (1, None)) == [1, 2, 17]
    assert row_counts(KERNEL_PATH, (7, 4096)) == [7, 8, 128]
    assert row_counts(SMALL, (90, None)) == [90, 91, 100]
    assert row_counts(SMALL, (3, 3)) == [3]
