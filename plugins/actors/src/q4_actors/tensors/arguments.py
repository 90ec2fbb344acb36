"""Arguments of a ``MutableTensor``: its mode, a name, contents and times, each checked."""

from __future__ import annotations

import enum
import functools
import threading

import torch

from q4core import ConfigError, InputError

__all__ = ["MAX_VERSION", "MutableMode", "check_content", "check_version", "label_of", "to_mode", "to_seconds"]

MAX_VERSION = 2**55 - 1
"""The last version: the word by which processes publish it has 8 bits for the slot, and a sign."""


class MutableMode(enum.Enum):
    """How an update and its readers are isolated from each other."""

    VERSIONED = "versioned"
    """Copy-on-write: readers never wait for a writer, a failed writer changes nothing, the address moves."""
    IN_PLACE = "in_place"
    """Stable address, no copy: readers and the writer keep each other out, a failed writer poisons the tensor."""


def label_of(name: object) -> str:
    """Return how messages call a tensor of this name."""
    if name is not None and not isinstance(name, str):
        raise ConfigError("MutableTensor", name="name", rule="text or None", value=name)
    return "mutable tensor" if name is None else f"mutable tensor {name!r}"


def to_mode(label: str, mode: object) -> MutableMode:
    """Return the mode that is meant."""
    try:
        return MutableMode(mode)
    except ValueError:
        legal = " or ".join(repr(member.value) for member in MutableMode)
        raise ConfigError(label, name="mode", rule=f"a MutableMode ({legal})", value=mode) from None


@functools.cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Return whether torch copies tensors of a dtype: it copies none that are quantised, or of less than a byte."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone()
    except RuntimeError:
        return False
    return True


def check_content(label: str, tensor: torch.Tensor, *, copy: bool) -> None:
    """Refuse a tensor that can't be shared; one that is taken uncopied must count its changes as well."""
    if not isinstance(tensor, torch.Tensor):
        raise InputError(label, name="tensor", rule="a tensor", value=type(tensor).__name__)
    if tensor.is_nested:
        raise InputError(label, name="tensor", rule="plain and strided", value="a nested tensor")
    if tensor.layout is not torch.strided or type(tensor.detach()) is not torch.Tensor:
        value = type(tensor).__name__ if tensor.layout is torch.strided else str(tensor.layout)
        raise InputError(label, name="tensor", rule="plain and strided", value=value)
    if not _is_copied(tensor.dtype):
        hint = "Dequantise it, or keep its bits as torch.uint8."
        raise InputError(label, name="dtype", rule="one whose tensors torch copies", value=tensor.dtype, hint=hint)
    if tensor.device.type not in {"cpu", "cuda"}:
        raise InputError(label, name="tensor", rule="on CPU or CUDA", value=str(tensor.device))
    if copy:
        return
    hint = "Leave copy=True."
    if tensor.is_inference():
        raise InputError(label, name="tensor", rule="one that counts its changes", value="inference tensor", hint=hint)
    if _may_overlap(tensor):
        raise InputError(label, name="tensor", rule="without overlap", value=tensor.stride(), hint=hint)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory: whether an axis steps less far than all finer ones reach."""
    reach = 0
    if not tensor.numel():
        return False
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def check_version(label: str, version: object, *, is_first: bool = False) -> None:
    """Refuse what is no number of a version, or of a first one."""
    rule = f"0 … {MAX_VERSION - 1}" if is_first else "an integer"
    if not isinstance(version, int) or isinstance(version, bool) or (is_first and not 0 <= version < MAX_VERSION):
        raise ConfigError(label, name="version", rule=rule, value=version)


def to_seconds(label: str, timeout: float | None) -> float | None:
    """Return a timeout that threads can wait for; None for no limit."""
    if timeout is None:
        return None
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout >= 0:
        return float(min(timeout, threading.TIMEOUT_MAX))
    raise ConfigError(label, name="timeout", rule="seconds, 0 or more, or None", value=timeout)
