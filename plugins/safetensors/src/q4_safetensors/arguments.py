"""What ``save_checkpoint`` is given, checked before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from q4core import CheckpointError, PackedWeight

__all__ = ["checked_tensor", "checked_weight", "require_config", "require_names", "require_texts"]

_NAMES = "keyed by names, each a text that is not empty and that UTF-8 has"


def _fail(name: str, rule: str, value: object) -> NoReturn:
    raise CheckpointError("save_checkpoint", name=name, rule=rule, value=value, hint="Nothing was written.")


def _is_text(value: object) -> bool:
    """Return whether a value is a text that UTF-8 has, as a header is written in it; lone surrogates are none."""
    try:
        return isinstance(value, str) and value.encode("utf-8") is not None
    except UnicodeEncodeError:
        return False


def require_names(argument: str, given: object) -> Mapping[str, Any]:
    """Return a mapping whose names a header can hold.

    Raises:
        CheckpointError: It is none, or has others.
    """
    if not isinstance(given, Mapping):
        _fail(argument, "a mapping", given)
    for name in given:
        if not name or not _is_text(name):
            _fail(argument, _NAMES, name)
    return given


def require_texts(argument: str, given: object) -> None:
    """Refuse what is no mapping of texts to texts.

    Raises:
        CheckpointError: It is none.
    """
    for name, value in require_names(argument, given).items():
        if not _is_text(value):
            _fail(f"{argument}[{name!r}]", "a text that UTF-8 has", value)


def require_config(given: object) -> None:
    """Refuse what can't be a ``config.json``.

    Raises:
        CheckpointError: It can't.
    """
    if not isinstance(given, Mapping):
        _fail("config", "a mapping", given)
    try:
        json.dumps(dict(given))
    except (TypeError, ValueError, RecursionError) as error:
        _fail("config", "what JSON can hold", str(error))


def checked_weight(module: str, value: Any) -> PackedWeight:
    """Return a weight.

    Raises:
        CheckpointError: It is none.
    """
    if not isinstance(value, PackedWeight):
        hint = " (q4.quantize makes one; other tensors belong in dense=)" if isinstance(value, torch.Tensor) else ""
        _fail(f"weights[{module!r}]", f"a PackedWeight{hint}", _seen(value))
    return value


def checked_tensor(name: str, value: Any) -> torch.Tensor:
    """Return a tensor.

    Raises:
        CheckpointError: It is none.
    """
    if not isinstance(value, torch.Tensor):
        _fail(f"dense[{name!r}]", "a tensor", _seen(value))
    return value


def _seen(value: object) -> object:
    """Return what an error shows of a value: itself where it is small, else its type."""
    return value if isinstance(value, (str, int, float, type(None))) else type(value).__name__
