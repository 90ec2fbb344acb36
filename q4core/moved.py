"""Errors for public names that live in another package now, and modules that another package brings.

A package calls ``getattr_of`` once, for its ``__getattr__``. An attribute that moved is an ``AttributeError``, and an
import of it an ``ImportError``; both name the package to install and the import that works.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["getattr_of"]


_messages: dict[str, str] = {}
"""Full name that moved → what an import of it raises."""


class _Finder:
    """A finder of imports that raises for names that moved, and finds nothing.

    ``from package import name`` asks for a submodule of that name, too, where the package lacks the attribute.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:  # noqa: ARG004  # a protocol
        """Raise for a moved name.

        Raises:
            ImportError: The name moved.
        """
        if name in _messages:
            raise ImportError(_messages[name], name=name)


sys.meta_path.insert(0, _Finder)  # before that of folders: one of compiled files may be left


def getattr_of(
    package: str, names: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package whose names moved.

    Args:
        package: The package's ``__name__``.
        names: Name that moved → the module that has it now, under the same name.
        modules: Name of a former submodule → the module that it is now. The attribute is that module, imported at its
            first use, where its package is installed; an import by the former name raises.
    """
    modules = modules or {}
    messages = {name: f"from {module} import {name}" for name, module in names.items()}
    messages |= {name: f"import {module}" for name, module in modules.items()}
    for name, module in {**names, **modules}.items():
        owner, _, _ = module.partition(".")
        install = f"pip install {owner.replace('_', '-')}, then {messages[name]}"
        messages[name] = f"{package}.{name} moved to {module}: {install}"
    _messages.update({f"{package}.{name}": message for name, message in messages.items()})

    def find(name: str) -> object:
        if name in modules:
            try:
                return importlib.import_module(modules[name])
            except ModuleNotFoundError as error:
                if error.name != modules[name].partition(".")[0]:
                    raise  # it is installed, and lacks something
        message = messages.get(name, f"module {package!r} has no attribute {name!r}")
        raise AttributeError(message, name=name, obj=sys.modules[package])

    return find
