"""Fixtures of the core's tests, which are run again here."""

from __future__ import annotations

import pytest
from shared_fixtures import content, keeps, other, state, threads

from q4core.mutable import MutableMode

__all__ = ["content", "keeps", "other", "state", "threads"]


@pytest.fixture(params=MutableMode, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> MutableMode:
    """Return a mode."""
    return MutableMode(request.param)
