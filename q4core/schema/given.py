"""What the functions that look for layers are given, refused by name where it is something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from q4core.errors import ConfigError, SchemaError

__all__ = ["dtype_and_shape", "holds_data", "require_arguments"]


def require_arguments(
    tensors: object,
    *,
    metadata: object = None,
    config: object = None,
    load: object = None,
    options: object = None,
) -> None:
    """Refuse arguments of a wrong kind.

    Raises:
        SchemaError: ``tensors`` is no mapping with texts as names.
        ConfigError: ``metadata`` is no mapping of texts to texts, ``config`` or ``options`` no mapping with texts as
            names, or ``load`` no function; None is legal for each.
    """
    if not isinstance(tensors, Mapping):
        rule = "a mapping of names to tensors"
        raise SchemaError("schema", name="tensors", rule=rule, value=type(tensors).__name__)
    for name in tensors:
        if not isinstance(name, str):
            raise SchemaError("schema", name="tensors", rule="keyed by texts", value=name)
    for argument, given in (("metadata", metadata), ("config", config), ("options", options)):
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError("schema", name=argument, rule="a mapping or None", value=given)
        for name, item in (given or {}).items():
            if not isinstance(name, str):
                raise ConfigError("schema", name=argument, rule="keyed by texts", value=name)
            if given is metadata and not isinstance(item, str):
                raise ConfigError("schema", name=f"metadata[{name!r}]", rule="a text", value=item)
    if load is not None and not callable(load):
        raise ConfigError("schema", name="load", rule="a function of a name, or None", value=load)


def dtype_and_shape(name: str, item: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of an entry.

    Raises:
        SchemaError: It has none, as torch counts them.
    """
    try:
        dtype, shape = item.dtype, tuple(item.shape)
    except (AttributeError, TypeError, RuntimeError):  # RuntimeError: nested and lazy tensors have no shape
        dtype, shape = None, ()
    if not isinstance(dtype, torch.dtype) or not all(isinstance(size, int) for size in shape):
        rule = "a tensor, or a TensorInfo of dtype and shape"
        shown = item if isinstance(item, (str, int, float, type(None))) else type(item).__name__
        raise SchemaError("schema", name=f"tensors[{name!r}]", rule=rule, value=shown)
    return dtype, shape


def holds_data(item: object) -> bool:
    """Return whether an entry is a tensor with numbers in it: no meta tensor, and none of torch's fake mode."""
    return isinstance(item, torch.Tensor) and not item.is_meta and not hasattr(item, "fake_mode")
