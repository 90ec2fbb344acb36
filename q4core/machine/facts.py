"""What this machine can do: CPU features, CUDA devices with their attributes, and the memory there is."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path
from typing import Any

import attrs
import torch

__all__ = ["CudaDevice", "MachineFacts", "cpu_features", "machine_facts", "memory_available_bytes"]

_WATCHED_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)


@attrs.frozen
class CudaDevice:
    """One CUDA device, as torch reports it."""

    index: int
    name: str
    capability: tuple[int, int]
    total_memory_bytes: int
    is_integrated: bool


@attrs.frozen
class MachineFacts:
    """What decides what may run here."""

    system: str
    machine: str
    processor: str
    cpu_count: int
    torch_threads: int
    cpu_features: tuple[str, ...]
    memory_available_bytes: int | None
    cuda_version: str | None
    cuda_devices: tuple[CudaDevice, ...]


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.partition(":")
        if separator:
            found.setdefault(name.strip(), value.strip())
    return found


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """Return the SIMD features of this CPU that a backend may care for, by their Linux names."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    if not flags:
        capability = torch.backends.cpu.get_cpu_capability()  # no /proc/cpuinfo: torch knows the main ones
        flags = {"avx2", "fma"} if capability in {"AVX2", "AVX512"} else set()
        flags |= {"avx512f"} if capability == "AVX512" else set()
    return tuple(name for name in _WATCHED_FEATURES if name in flags)


def memory_available_bytes() -> int | None:
    """Return the memory that can be taken without swapping (``MemAvailable``), or None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return what makes a CUDA device the current one inside a ``with`` block; on a CPU it does nothing."""
    if device.type != "cuda" or device.index in {None, torch.cuda.current_device()}:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _cuda_devices() -> tuple[CudaDevice, ...]:
    if not torch.cuda.is_available():
        return ()
    devices = []
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        devices.append(
            CudaDevice(
                index=index,
                name=properties.name,
                capability=(properties.major, properties.minor),
                total_memory_bytes=properties.total_memory,
                is_integrated=bool(getattr(properties, "is_integrated", False)),
            )
        )
    return tuple(devices)


def machine_facts() -> MachineFacts:
    """Return the facts of this machine; asks the CUDA driver if there is one."""
    info = _cpuinfo()
    return MachineFacts(
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        processor=info.get("model name", platform.processor() or "unknown"),
        cpu_count=os.cpu_count() or 1,
        torch_threads=torch.get_num_threads(),
        cpu_features=cpu_features(),
        memory_available_bytes=memory_available_bytes(),
        cuda_version=torch.version.cuda,
        cuda_devices=_cuda_devices(),
    )
