"""What is recognised and not read: dialects without a reader, and paths that hold no checkpoint."""

from __future__ import annotations

import collections
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from q4core.errors import CheckpointError, SchemaError
from q4core.schema.catalogue import Problem

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from q4core.schema.catalogue import Catalogue
    from q4core.schema.dialect import Dialect

__all__ = ["describe_path", "find_unread", "require_layers"]

_KEYS = {"qweight": "gptq or awq", "W_q": "hqq", "weight_packed": "compressed-tensors"}
"""Last part of a key → what stores packed codes under it, where no config names a method."""
_PACKAGED = ("bitsandbytes", "compressed-tensors", "modelopt", "torchao")
"""Methods that q4-dialects reads."""
_CODES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SAVE = "Save the model as safetensors; save_pretrained of transformers does, and safetensors.torch.save_file."


def find_unread(catalogue: Catalogue, dialects: Iterable[Dialect]) -> tuple[Problem, ...]:
    """Return a problem for each module that holds packed codes, in a file in which no dialect found a layer.

    They are told by the config's ``quant_method`` and by the names of the keys.
    """
    quantization: Any = catalogue.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    known = [dialect.name for dialect in dialects]
    found: dict[str, Problem] = {}
    for name, info in catalogue.tensors.items():
        module, _, suffix = name.rpartition(".")
        owner = method if isinstance(method, str) else _KEYS.get(suffix)
        if module and owner is not None and info.dtype in _CODES and len(info.shape) > 1:
            found[module] = Problem("unsupported", module, _rule(owner, known), owner)
    return tuple(found.values())


def _rule(owner: str, known: Iterable[str]) -> str:
    if owner not in _PACKAGED:
        return "in a dialect that is read; this one is known, but nothing here reads it yet"
    if any(name.startswith(owner) for name in known):
        return "stored as an installed dialect has it"
    return "in a dialect that is installed; python3 -m pip install q4-dialects brings this one"


def require_layers(schema: Any, path: str) -> None:
    """Refuse a checkpoint whose layers are recognised, of which none can be read.

    Raises:
        SchemaError: It names the file, the dialects, the number of layers and what is missing.
    """
    if schema.layers or not schema.unsupported:
        return
    groups = collections.Counter((item.rule, str(item.value)) for item in schema.unsupported)
    problems = [
        Problem("unsupported", "1 layer" if count == 1 else f"{count} layers", rule, value)
        for (rule, value), count in groups.most_common()
    ]
    raise SchemaError(
        "checkpoint: its packed layers are recognised, and none can be read",
        where=path,
        hint="`q4 doctor` lists the dialects that are read here.",
        problems=problems,
        schema=schema,
    )


def describe_path(path: str | os.PathLike[str]) -> CheckpointError | None:
    """Return what a path that could not be opened is, and what to do, or None where there is nothing to add."""
    place = Path(path)
    what: str | None = None
    with contextlib.suppress(OSError, ValueError):
        if not place.exists():
            what = "the path does not exist"
            hint = "Name a safetensors file, an index of shards, a model folder, or a GGUF file."
        elif place.is_dir():
            suffixes = {item.suffix for item in place.iterdir()}
            if ".safetensors" not in suffixes and not any(place.glob("*.safetensors.index.json")):
                what, hint = "the folder holds no weights", "Name a folder with a safetensors file in it."
                if ".gguf" in suffixes:
                    what, hint = "the folder holds GGUF files", "Name the file that you mean."
                elif suffixes & {*_PICKLES}:
                    what, hint = "the folder holds pickles, which may run code while they are read", _SAVE
        elif place.is_file() and not place.stat().st_size:
            what, hint = "the file is empty", "Copy or download it again."
        elif place.is_file() and place.suffix in _PICKLES:
            what, hint = "the file is a pickle, which may run code while it is read", _SAVE
    return None if what is None else CheckpointError(f"checkpoint: {what}", where=str(path), hint=hint)
