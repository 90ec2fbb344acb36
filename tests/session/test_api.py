"""The functions that people type stand for those of the rooms below, with the plugins filled in."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import pytest

import q4core as q4
from q4core.session import quantizer

if TYPE_CHECKING:
    from collections.abc import Callable

STAND_FOR: dict[str, Callable[..., Any]] = {
    "quantize": quantizer.quantize,
}
PLUGINS = {"registry"}


def _arguments(function: Callable[..., Any]) -> list[tuple[str, object, object]]:
    return [(item.name, item.kind, item.default) for item in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", STAND_FOR)
def test_arguments_are_those_of_what_a_function_stands_for(name: str) -> None:
    """Each has the same names, in the same order, with the same defaults; only what the plugins bring is left out."""
    below = [argument for argument in _arguments(STAND_FOR[name]) if argument[0] not in PLUGINS]
    assert _arguments(getattr(q4, name)) == below


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
