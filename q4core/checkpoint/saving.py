"""Saving a checkpoint by the one writer that takes its path, with arguments checked before anything is written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from q4core.checkpoint.opening import way_to
from q4core.errors import CheckpointError
from q4core.weight import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4core.checkpoint.contract import CheckpointWriter, SaveRequest

__all__ = ["save_by"]

_WHAT = "save_checkpoint"
_TEXT = "a text that UTF-8 has"


def save_by(
    writers: Iterable[CheckpointWriter],
    path: object,
    weights: Mapping[str, PackedWeight],
    request: SaveRequest,
    plugins: Mapping[str, str],
) -> Path:
    """Save a checkpoint by the one writer that takes its path, and return what opens it.

    See ``q4core.save_checkpoint`` for the errors; ``plugins`` is name → state, for the hint of one.
    """
    target = _checked_path(path)
    _check_items("weights", weights, PackedWeight)
    _check_items("dense", {} if request.dense is None else request.dense, torch.Tensor)
    _check_items("metadata", {} if request.metadata is None else request.metadata, str)
    if request.config is not None and not isinstance(request.config, Mapping):
        _fail("config", "a mapping", request.config)
    try:
        json.dumps(dict(request.config or {}))
    except (TypeError, ValueError, RecursionError) as error:
        _fail("config", "what JSON can hold", str(error))
    known = tuple(writers)
    try:
        fitting = [writer for writer in known if writer.accepts(target)]
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(_WHAT, name="file", rule="writable", value=reason, where=str(target)) from error
    if len(fitting) == 1:
        return fitting[0].write(target, weights, request)
    names = ", ".join(writer.name for writer in fitting or known)
    rule = "a file or folder that exactly one installed writer takes"
    value = names if fitting else f"none of {names}" if known else f"{target.name}, and no writer is installed"
    hint = "Name a folder, or a file that ends in .safetensors." if known else way_to("safetensors", plugins)
    raise CheckpointError(_WHAT, name="path", rule=rule, value=value, where=str(target), hint=hint)


def _fail(name: str, rule: str, value: object) -> NoReturn:
    raise CheckpointError(_WHAT, name=name, rule=rule, value=value, hint="Nothing was written.")


def _checked_path(path: object) -> Path:
    try:
        text = os.fspath(path)  # type: ignore[call-overload]  # what it raises for other things is the question
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return Path(text)
    except (TypeError, UnicodeEncodeError):
        pass
    _fail("path", "a path", path)


def _is_text(value: object) -> bool:
    """Return whether a value is a text that UTF-8 has, as a header is written in it; lone surrogates are none."""
    try:
        return isinstance(value, str) and value.encode("utf-8") is not None
    except UnicodeEncodeError:
        return False


def _check_items(argument: str, given: object, kind: type) -> None:
    """Check that a header can hold the names of a mapping, and that a dict holds items of a kind.

    The items of a lazy mapping are taken one at a time, when they are written.
    """
    if not isinstance(given, Mapping):
        _fail(argument, "a mapping", given)
    for name in given:
        if not name or not _is_text(name):
            _fail(argument, f"keyed by names, each {_TEXT} and not empty", name)
    for name, item in given.items() if isinstance(given, dict) else ():
        if kind is str and not _is_text(item):
            _fail(f"{argument}[{name!r}]", _TEXT, item)
        if not isinstance(item, kind):
            hint = " (q4.quantize makes one; other tensors belong in dense=)" if isinstance(item, torch.Tensor) else ""
            shown = item if isinstance(item, (str, int, float, type(None))) else type(item).__name__
            _fail(f"{argument}[{name!r}]", f"a {kind.__name__}{hint}", shown)
