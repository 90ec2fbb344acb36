"""Fixtures that several files of tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fakes import reference_alone
from shared_fixtures import content, keeps, other, state, threads
from sharing import MODES

import q4core as q4
from q4_conformance.zoo import plugin
from q4core.mutable import MutableMode, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["content", "keeps", "other", "reference_alone", "state", "threads"]


@pytest.fixture(params=MODES, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> MutableMode:
    """Return each mode in turn."""
    return MutableMode(request.param)


@pytest.fixture
def locks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes agree by the core's own locks, also where a plugin with atomics is installed."""
    monkeypatch.setattr(shared, "find_cells", lambda: None)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs animals of the zoo, as a plugin of this process and of its children."""

    def installed(*names: str) -> None:
        plugin.release(*names)
        monkeypatch.setenv("Q4_PLUGIN_MODULES", plugin.MODULE)
        monkeypatch.setenv(plugin.VARIABLE, ",".join(names))
        q4.reset_registry()

    yield installed
    monkeypatch.undo()
    q4.reset_registry()
