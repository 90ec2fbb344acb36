"""Names that other packages have now."""

from __future__ import annotations

import importlib

import pytest

import q4_nn


@pytest.mark.parametrize("package", ["q4_lm", "q4_programs"])
def test_a_moved_name_says_where_it_lives(package: str) -> None:
    """Each raises an error that names the package, which has it under the same name."""
    moved = {"q4_lm": q4_nn._TO_LM, "q4_programs": q4_nn._TO_PROGRAMS}[package]
    assert set(moved) <= {*importlib.import_module(package).__all__}
    for name in moved:
        with pytest.raises(AttributeError, match=rf"q4_nn\.{name} moved to {package}: pip install .*import {name}"):
            getattr(q4_nn, name)
    with pytest.raises(ImportError, match=f"from {package} import {moved[0]}"):
        exec(f"from q4_nn import {moved[0]}")  # noqa: S102  # an import that a checker would refuse
