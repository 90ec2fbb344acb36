"""Backends that are not installed: made by ``module:function``, and lent to the registry as a plugin's.

Copies and pickles of a layer look for their backend in the process's registry. A backend that is judged as an object
is in none, so it is lent to the registry for as long as a case needs it there.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
from typing import TYPE_CHECKING, Any

from q4core import Backend, default_registry, hookimpl, reset_registry

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLE = "Q4_PLUGIN_MODULES"
_MODULE = "q4_conformance.subjects.temporary_plugin"
_lent: list[Backend] = []
_MADE: list[tuple[Any, str]] = []
"""What was made and by which name: one subject for each process, so that it may stay."""


@hookimpl
def q4_backends() -> list[Backend]:
    """Return what is lent."""
    return list(_lent)


def is_installed(backend: Backend) -> bool:
    """Return whether the process's registry has this very backend."""
    return default_registry().backends().get(backend.name) is backend


@contextlib.contextmanager
def lent(backend: Backend) -> Iterator[None]:
    """Let the process's registry have ``backend`` inside the ``with`` block."""
    if is_installed(backend):
        yield
        return
    before = {name: os.environ.get(name) for name in (_VARIABLE, "Q4_CACHE")}
    _lent.append(backend)
    os.environ[_VARIABLE] = ",".join(filter(None, (before[_VARIABLE], _MODULE)))
    os.environ["Q4_CACHE"] = "off"  # its proofs are its own: the next backend of the name may be another one
    reset_registry()
    try:
        yield
    finally:
        _lent.remove(backend)
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
        reset_registry()


def make(name: str) -> Any:
    """Return what ``module:function`` makes."""
    made = pkgutil.resolve_name(name)()
    _MADE.append((made, name))
    return made


def maker_of(item: object) -> str | None:
    """Return the ``module:function`` that made this very object, or None."""
    return next((name for made, name in _MADE if made is item), None)
