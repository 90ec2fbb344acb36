"""Fixtures that several files of tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import q4core as q4
from q4_conformance_faults import plugin
from tests.support.events import forget_warnings
from tests.support.fakes import reference_alone
from tests.support.unread import has_dialects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["has_dialects", "reference_alone"]


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    """Let every warning be given again, so that each test sees its own."""
    forget_warnings()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs toys and planted faults, as a plugin of this process and of its children."""

    def installed(*names: str) -> None:
        plugin.release(*names)
        monkeypatch.setenv("Q4_PLUGIN_MODULES", plugin.MODULE)
        monkeypatch.setenv(plugin.VARIABLE, ",".join(names))
        q4.reset_registry()

    yield installed
    monkeypatch.undo()
    q4.reset_registry()
