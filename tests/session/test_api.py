"""Names that moved say where they are now."""

from __future__ import annotations

import importlib

import pytest

import q4core as q4


@pytest.mark.parametrize(("name", "package"), sorted(q4._MOVED.items()))
def test_a_name_that_moved_says_where_it_is(name: str, package: str) -> None:
    """The old name is an AttributeError with the package to install and the import that works."""
    with pytest.raises(AttributeError) as caught:
        getattr(q4, name)
    assert caught.value.name == name
    assert f"pip install {package.replace('_', '-')}, then from {package} import {name}" in str(caught.value)
    assert hasattr(importlib.import_module(package), name)
    assert not hasattr(q4, name)


def test_a_name_that_never_was_is_an_ordinary_error() -> None:
    """A typo gets Python's own words, and moved names are not offered for it."""
    with pytest.raises(AttributeError, match="module 'q4core' has no attribute 'lineer'"):
        _ = q4.lineer  # type: ignore[attr-defined]
