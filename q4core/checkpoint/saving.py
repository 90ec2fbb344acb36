"""Saving a checkpoint by the one writer that takes its path, with arguments checked before anything is written."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch

from q4core.checkpoint.opening import way_to
from q4core.diagnostics.events import emit
from q4core.errors import CheckpointError
from q4core.weight import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4core.checkpoint.contract import CheckpointWriter, SaveRequest

_WHAT = "save_checkpoint"
_TEXT = "a text that UTF-8 has"


def save_by(
    writers: Iterable[CheckpointWriter], path: object, weights: object, request: SaveRequest, plugins: Mapping[str, str]
) -> Path:
    """Save a checkpoint by the one writer that takes its path; see ``q4core.save_checkpoint``, and ``open_by``."""
    target = _checked_path(path)
    for name, text in _mapping("metadata", request.metadata).items():
        _check_name("metadata", name)
        if isinstance(text, str) and not _is_text(text):
            _fail(f"metadata[{name!r}]", _TEXT, text)
    if request.config is not None and not isinstance(request.config, Mapping):
        _fail("config", "a mapping", request.config)
    try:
        json.dumps(dict(request.config or {}))
    except (TypeError, ValueError, RecursionError) as error:
        _fail("config", "what JSON can hold", str(error))
    if weights is None:
        _fail("weights", "a mapping", weights)
    checked = _Checked("weights", _mapping("weights", weights), PackedWeight)
    dense = _Checked("dense", _mapping("dense", request.dense), torch.Tensor)
    known = tuple(writers)
    try:
        fitting = [writer for writer in known if writer.accepts(target)]
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(_WHAT, name="file", rule="writable", value=reason, where=str(target)) from error
    if len(fitting) == 1:
        written = fitting[0].write(target, checked, attrs.evolve(request, dense=dense))
        facts = {"writer": fitting[0].name, "dialect": request.dialect, "layers": len(checked), "dense": len(dense)}
        emit("q4.save", level=logging.INFO, path=str(written), lossy=request.lossy, **facts)
        return written
    names = ", ".join(writer.name for writer in fitting or known)
    rule = "a file or folder that exactly one installed writer takes"
    value = names if fitting else f"none of {names}" if known else f"{target.name}, and no writer is installed"
    hint = "Name a folder, or a file that ends in .safetensors or .gguf." if known else way_to("safetensors", plugins)
    raise CheckpointError(_WHAT, name="path", rule=rule, value=value, where=str(target), hint=hint)


class _Checked(Mapping[str, Any]):
    """A mapping, lazy or not, whose names and items are checked as they are taken, once: to iterate may be the work."""

    def __init__(self, argument: str, given: Mapping[str, Any], kind: type) -> None:
        self._argument = argument
        self._given = given
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        value = self._given[name]
        if not isinstance(value, self._kind):
            hint = " (q4.quantize makes one; other tensors belong in dense=)" if isinstance(value, torch.Tensor) else ""
            shown = value if isinstance(value, (str, int, float, type(None))) else type(value).__name__
            _fail(f"{self._argument}[{name!r}]", f"a {self._kind.__name__}{hint}", shown)
        return value

    def __iter__(self) -> Iterator[str]:
        for name in self._given:
            _check_name(self._argument, name)
            yield name

    def __len__(self) -> int:
        return len(self._given)


def _fail(name: str, rule: str, value: object) -> NoReturn:
    raise CheckpointError(
        _WHAT, name=name, rule=rule, value=value, hint="Correct it and save again; nothing was written."
    )


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


def _mapping(argument: str, given: object) -> Mapping[str, Any]:
    """Return what was given; an empty mapping for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        _fail(argument, "a mapping", given)
    return given


def _check_name(argument: str, name: object) -> None:
    if not name or not _is_text(name):
        _fail(argument, f"keyed by names, each {_TEXT} and not empty", name)
