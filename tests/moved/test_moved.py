"""Names that moved say where they are now."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING

import pytest

import q4core as q4
from q4core.moved import getattr_of
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def _run(statement: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(statement, names)  # noqa: S102  # an import that a linter would refuse
    return names


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Return an imported package some of whose names moved."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    module = types.ModuleType("old_home")
    module.__path__ = []
    modules = {"tools": "new_home.tools", "dates": "email.utils"}
    module.__getattr__ = getattr_of("old_home", {"Thing": "new_home"}, modules)  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "old_home", module)
    yield module
    sys.modules.pop("old_home.tools", None)


@pytest.mark.parametrize(("name", "package"), sorted(q4._MOVED.items()))
def test_a_name_that_moved_says_where_it_is(name: str, package: str) -> None:
    """The old name is an AttributeError with the package to install and the import that works."""
    with pytest.raises(AttributeError) as caught:
        getattr(q4, name)
    assert caught.value.name == name
    assert f"pip install {package.replace('_', '-')}, then from {package} import {name}" in str(caught.value)
    assert hasattr(importlib.import_module(package), name)
    assert not hasattr(q4, name)


@pytest.mark.parametrize("name", sorted(q4._MOVED))
def test_an_import_of_a_name_that_moved_says_where_it_is(name: str) -> None:
    """``from q4core import name`` has the words of the attribute, not Python's own."""
    with pytest.raises(ImportError) as caught:
        _run(f"from q4core import {name}")
    with pytest.raises(AttributeError) as attribute:
        getattr(q4, name)
    assert str(caught.value) == str(attribute.value)


def test_a_name_that_never_was_is_an_ordinary_error() -> None:
    """A typo gets Python's own words, and moved names are not offered for it."""
    with pytest.raises(AttributeError, match="module 'q4core' has no attribute 'lineer'"):
        _ = q4.lineer  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'lineer' from 'q4core'"):
        _run("from q4core import lineer")


@pytest.mark.parametrize("statement", ["import old_home.tools", "from old_home.tools import saw"])
def test_an_import_of_a_former_submodule_says_where_it_is(package: types.ModuleType, statement: str) -> None:
    """A submodule that moved is an ImportError with the package and the import that works."""
    message = "old_home.tools moved to new_home.tools: pip install new-home, then import new_home.tools"
    with pytest.raises(ImportError) as caught:
        _run(statement)
    assert (str(caught.value), caught.value.name) == (message, "old_home.tools")
    with pytest.raises(AttributeError) as attribute:
        _ = package.tools
    assert str(attribute.value) == message


def test_a_former_submodule_is_an_attribute_where_its_package_is_installed(package: types.ModuleType) -> None:
    """The attribute is the module itself, also by ``from``, and a module that is there but broken says so itself."""
    assert package.dates is _run("from old_home import dates")["dates"] is importlib.import_module("email.utils")


def test_a_broken_module_raises_its_own_error(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the package is installed and lacks something, the error names what is missing."""
    (tmp_path / "new_home.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        _ = package.tools


def test_a_package_that_is_imported_again_has_one_finder() -> None:
    """A reload of a package adds nothing to the finders of imports."""
    count = "n = len(sys.meta_path)"
    code = f"import importlib, sys, q4core; {count}; importlib.reload(q4core); assert {count.replace('=', '==')}"
    run_interpreter(["-c", code], check=True, timeout=scaled(120))


@pytest.mark.parametrize(("name", "module"), sorted(q4._MODULES.items()))
def test_a_module_whose_package_is_missing_says_what_to_install(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``q4.programs`` and ``q4.spikes`` name the package that brings them where it is not installed."""
    package = module.partition(".")[0]

    class Hiding:
        def find_spec(self, found: str, *_: object) -> None:
            if found.partition(".")[0] == package:
                raise ModuleNotFoundError(name=found)

    for item in [item for item in sys.modules if item.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, item)
    monkeypatch.setattr(sys, "meta_path", [Hiding(), *sys.meta_path])
    with pytest.raises(AttributeError) as caught:
        getattr(q4, name)
    assert str(caught.value).startswith(f"q4core.{name} moved to {module}: pip install {package.replace('_', '-')}")
