"""Fixtures of the tests of mutable tensors and actors."""

from __future__ import annotations

import pytest
from actor_fixtures import heard, runtime, system
from shared_fixtures import content, keeps, other, state, threads
from sharing import MODES

from q4_actors import MutableMode

__all__ = ["content", "heard", "keeps", "other", "runtime", "state", "system", "threads"]


@pytest.fixture(params=MODES, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> MutableMode:
    """Return each mode in turn."""
    return MutableMode(request.param)
