"""Fixtures of the core's tests, which are run again here."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING

import pytest

from q4core.mutable import MutableMode

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=MutableMode, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> MutableMode:
    """Return a mode."""
    return MutableMode(request.param)


@pytest.fixture(params=[True, False], ids=["kept", "collected"])
def keeps(request: pytest.FixtureRequest) -> bool:
    """Whether somebody still holds the block that its thread did not leave."""
    return bool(request.param)


@pytest.fixture
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Give a pool whose threads are joined at the end."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool
