"""What a call allocates: torch's own tensors, and the peak of the process's memory.

A path that says KERNEL computes from 4-bit data. One that makes the dense weight first, whole or slice by slice, makes
N × K floating-point elements on the way; torch's dispatcher sees them when torch makes them, and the peak of resident
memory shows whole ones that native code makes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Allocations", "trim", "watch"]

_PEAKS = 3
"""Plain calls, of which the least peak counts: other threads of the process allocate at times, a call each time."""
_KIB = 1024
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@attrs.frozen
class Allocations:
    """What one call allocated.

    Args:
        float_elements: Floating-point elements in all tensors that torch made, added up.
        peak_bytes: By how much the device's memory (on the CPU, resident memory) peaked above its start; None where
            nobody says.
    """

    float_elements: int
    peak_bytes: int | None


class _Counter(TorchDispatchMode):
    """Counts the floating-point elements of every new storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        inputs = _tensors(args) + _tensors(tuple((kwargs or {}).values()))
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}  # views and in-place results make nothing
        for tensor in _tensors((result,)):
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in known:
                self.elements += tensor.untyped_storage().nbytes() // tensor.element_size()
        return result


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(tuple(value))
    return found


def _status(field: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field):
            return int(line.split()[1]) * _KIB
    return None


def trim() -> None:
    """Give freed memory back to the system, where the C library can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> bool:
    """Give freed memory back to the system and start the peak anew; say whether that worked."""
    if sys.platform != "linux":
        return False
    try:
        trim()
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _cuda_peak(device: torch.device, call: Callable[[], object]) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    with torch.no_grad():
        call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start


def watch(call: Callable[[], object], device: torch.device | None = None) -> Allocations:
    """Run ``call`` under torch's dispatcher, then plainly a few times, and return what it allocated.

    Args:
        call: Does the same each time. A first call outside the count should have warmed it up.
        device: Where it computes; the CPU unless told.
    """
    counter = _Counter()
    with torch.no_grad(), counter:
        call()
    if device is not None and device.type == "cuda":
        return Allocations(counter.elements, _cuda_peak(device, call))
    peaks = [_host_peak(call) for _ in range(_PEAKS)]
    return Allocations(counter.elements, min((peak for peak in peaks if peak is not None), default=None))


def _host_peak(call: Callable[[], object]) -> int | None:
    can_peak = _reset_peak()
    start = _status("VmRSS:") if can_peak else None
    with torch.no_grad():
        call()
    peak = _status("VmHWM:") if can_peak else None
    return None if start is None or peak is None else max(0, peak - start)
