"""Allocations of a call: torch's own tensors that are alive at once, and the peak of the process's memory.

A path that says KERNEL computes from 4-bit data. One that makes the dense weight first holds N × K elements at some
time. torch's dispatcher sees those that torch makes, and the peak of resident memory shows those of native code. A path
that decodes a few rows and lets them go holds few at any time, however many in sum. What stays after a call is no peak:
``taken_bytes`` before and after shows it.

Resident memory says little about one call of a process that has run for long: glibc serves a block of megabytes from
memory that was freed before, and keeps its pages. So while memory is measured, each block of ``LARGE_BYTES`` or more is
a mapping of its own, as in a young process: it is resident while it is held, and no longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PEAKS = 4
"""Calls, of which the least peak counts: other threads of the process allocate at times, a call each time."""
_KIB = 1024
_STATUS = Path("/proc/self/status")
_MAPPINGS = Path("/proc/self/smaps")
_PLACES = Path("/proc/self/maps")
_OPEN = Path("/proc/self/fd")
_BLOCK = 512
"""Bytes of the blocks that ``stat`` counts in."""
_CLEAR = Path("/proc/self/clear_refs")
_COUNTS = Path("/proc/self/io")


@attrs.frozen
class Allocations:
    """What one call allocated.

    The most elements of torch's tensors made in it that were alive at once, and by how many bytes the memory of the
    device (on the CPU, what is resident) peaked above before and after; None where it is unknown.
    """

    elements: int
    peak_bytes: int | None


class _Counter(TorchDispatchMode):
    """Counts the elements of new storages that are alive at once."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch not load its compiler, which takes a second, only to keep it away from this."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.elements = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        inputs = _tensors(args) + _tensors(tuple((kwargs or {}).values()))
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in inputs}  # noqa: SLF001  # by which torch distinguishes storages
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            key = storage._cdata  # noqa: SLF001  # as above
            if key in self._alive or key not in given:  # views and in-place results of what was there make nothing
                self._alive[key] = (StorageWeakRef(storage), storage.nbytes() // tensor.element_size())
        self.elements = max(self.elements, sum(elements for _, elements in self._alive.values()))
        return result


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(tuple(value))
    return found


def status_bytes() -> dict[str, int]:
    """Return the sizes in this process's status, in bytes; nothing where the system does not say."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) * _KIB for name, value, _ in words}


def trim() -> None:
    """Give freed memory back to the system, where the C library can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _absent_heap_bytes() -> int:
    """Return how much of the heap is not resident: its size without what is."""
    absent = 0
    in_heap = False
    with _MAPPINGS.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line[0].isupper():  # the next mapping; the heap's pieces, if there are several, follow each other
                if in_heap and "[heap]" not in line:
                    break
                in_heap = "[heap]" in line
            elif in_heap and line.startswith("Size:"):
                absent += int(line.split()[1]) * _KIB
            elif in_heap and line.startswith("Rss:"):
                absent -= int(line.split()[1]) * _KIB
    return absent


def _file_bytes() -> int:
    """Return the size of all mapped files, shared memory among them, and of all that are open and not mapped."""
    total, mapped = 0, set()
    for line in _PLACES.read_text(encoding="utf-8", errors="replace").splitlines():
        span, _, _, device, inode = line.split(maxsplit=5)[:5]
        if inode != "0":
            start, end = (int(place, 16) for place in span.split("-"))
            total += end - start
            mapped.add((device, int(inode)))
    for entry in _OPEN.iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is gone by now
            facts = entry.stat()
            place = (f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}", facts.st_ino)
            if stat.S_ISREG(facts.st_mode) and place not in mapped:
                total += facts.st_blocks * _BLOCK
    return total


def taken_bytes(device: torch.device) -> int | None:
    """Return the memory that this process has taken on a device; None where it is unknown.

    On the CPU that is its own resident memory, and the files and shared memory that it has mapped or open. Of those and
    of the heap every page counts, resident or not: the pages of a file may be in memory without an owner, and
    freed pages of the heap come and go with every small block.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    facts = status_bytes()
    if "RssAnon" not in facts:
        return None
    try:
        return facts["RssAnon"] + _file_bytes() + _absent_heap_bytes()
    except OSError:
        return None


def _cuda_peak(device: torch.device, call: Callable[[], object]) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    with torch.no_grad():
        call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start


def watch(call: Callable[[], object], device: torch.device | None = None, *, enough_bytes: int = 0) -> Allocations:
    """Run ``call`` under torch's dispatcher, then plainly while its peak is over ``enough_bytes``; return the least.

    What the call keeps from its first run on is no part of any peak.
    """
    counter = _Counter()

    def counted() -> None:
        with counter:
            call()

    if device is not None and device.type == "cuda":
        peak = _cuda_peak(device, counted)
        return Allocations(counter.elements, peak)
    with own_mappings():
        peaks = [_host_peak(counted)]
        while len(peaks) < _PEAKS and (peaks[-1] or 0) > enough_bytes:
            peaks.append(_host_peak(call))
    return Allocations(counter.elements, min((peak for peak in peaks if peak is not None), default=None))


def _host_peak(call: Callable[[], object]) -> int | None:
    """Return how far resident memory rose above what it was and what it then is.

    A page that becomes resident and stays is the heap's; a large block is a mapping of its own and goes.
    """
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")  # the peak starts anew
    before = status_bytes().get("VmRSS") if sys.platform == "linux" else None
    with torch.no_grad():
        call()
    after = status_bytes()
    if before is None or "VmHWM" not in after or "VmRSS" not in after:
        return None
    return max(0, after["VmHWM"] - max(before, after["VmRSS"]))


def rise_of(call: Callable[[], object]) -> int:
    """Return how far resident memory rose in a call, mapped pages of files included; 0 where that is unknown."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")  # the peak starts anew
    before = status_bytes().get("VmRSS")
    call()
    return 0 if before is None else max(0, status_bytes().get("VmHWM", 0) - before)


def read_bytes() -> int:
    """Return how many bytes this process has read so far by calls of the system; 0 where that is unknown."""
    try:
        return int(_COUNTS.read_text(encoding="ascii").split()[1])
    except OSError:
        return 0


LARGE_BYTES = 1 << 17
"""glibc's own threshold when a process starts; each large block that is freed raises it."""
_HIGHEST_BYTES = 1 << 25
"""As far as glibc itself raises it; there it is left, because what it was can't be asked."""
_M_MMAP_THRESHOLD = -3
_IS_MAPPED = 2
"""The flag of a mapping of its own, in the word before a block of glibc's."""
_MOST_BLOCKS = 1 << 15


def _glibc() -> Any:
    """Return the C library where it is glibc, else None."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return library


def _fill(library: Any) -> list[int]:
    """Take every free piece of the heap that could hold a large block, untouched, and return the blocks."""
    blocks: list[int] = []
    while len(blocks) < _MOST_BLOCKS:
        block = library.malloc(LARGE_BYTES)
        if not block:
            break
        blocks.append(block)
        if ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _IS_MAPPED:
            break
    return blocks


@contextlib.contextmanager
def own_mappings() -> Iterator[None]:
    """Let large blocks be mappings of their own in this thread, where the C library can; elsewhere change nothing."""
    library = _glibc()
    if library is None or library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) != 1:
        yield
        return
    blocks = _fill(library)
    try:
        yield
    finally:
        for block in blocks:
            library.free(block)
        library.mallopt(_M_MMAP_THRESHOLD, _HIGHEST_BYTES)
