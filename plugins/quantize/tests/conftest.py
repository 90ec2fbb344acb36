"""Every warning may be given again, so that each test sees its own."""

from __future__ import annotations

import pytest

from tests.support.events import forget_warnings


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    """Let every warning be given again."""
    forget_warnings()
