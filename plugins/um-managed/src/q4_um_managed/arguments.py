"""Arguments of a ``ManagedProvider``: tensors, shapes and devices, each checked."""

from __future__ import annotations

import math
import threading

import torch

from q4_um_managed.storage import is_plain
from q4core import ConfigError, InputError

__all__ = ["check_source", "size_of", "to_device", "to_seconds"]

_MAX_BYTES = (1 << 63) - 1
"""torch counts in signed 64-bit numbers."""


def check_source(what: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without contents that can be copied byte by byte.

    Raises:
        InputError: It has none.
    """
    if is_plain(tensor) and tensor.device.type != "meta":
        return
    rule = "a strided tensor with contents, neither nested nor quantised"
    raise InputError(what, name="tensor", rule=rule, value=_kind_of(tensor), hint="Make a plain tensor of it first.")


def _kind_of(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_nested:
        return "nested"
    return str(tensor.dtype) if tensor.is_quantized else str(tensor.device)


def size_of(what: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return how many bytes a contiguous tensor has.

    Raises:
        InputError: No tensor has that shape, or it is no dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise InputError(what, name="dtype", rule="a torch.dtype", value=dtype)
    try:
        sizes = torch.Size(shape)
    except (TypeError, ValueError):
        sizes = None
    # torch multiplies strides as if empty dimensions had one element.
    if sizes is None or min(sizes, default=0) < 0 or _span(sizes) * dtype.itemsize > _MAX_BYTES:
        rule = "sizes of 0 or more, of less than 2^63 bytes together"
        raise InputError(what, name="shape", rule=rule, value=shape)
    return math.prod(sizes) * dtype.itemsize


def _span(sizes: torch.Size) -> int:
    return math.prod(max(1, size) for size in sizes)


def to_device(what: str, device: torch.device | str) -> torch.device:
    """Return the device that is meant.

    Raises:
        ConfigError: torch knows no such device.
    """
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(what, name="device", rule="a torch device", value=device) from None


def to_seconds(what: str, timeout: float) -> float:
    """Return a time limit that threads can wait for.

    Raises:
        ConfigError: It is no number of 0 or more.
    """
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout >= 0:
        return float(min(timeout, threading.TIMEOUT_MAX))
    raise ConfigError(what, name="timeout", rule="seconds, 0 or more, or None", value=timeout)
