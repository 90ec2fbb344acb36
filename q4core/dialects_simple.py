"""The two simplified dialects: NF4 or FP4 as a trio of siblings, and single-level NVFP4 as a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from q4core.dialect import Dialect

__all__ = ["SIMPLE_DIALECTS"]

SIMPLE_DIALECTS: tuple[Dialect, ...] = ()
