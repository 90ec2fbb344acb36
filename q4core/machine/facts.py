"""Facts about this machine: CPU features, CUDA devices with their attributes, and the memory there is."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import attrs
import torch

_WATCHED_FEATURES = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_int8",
    "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


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
    """What decides what may run here.

    ``memory_available_bytes`` can be taken without swapping (``MemAvailable``); None where the system does not say.
    """

    system: str
    machine: str
    processor: str
    cpu_count: int
    torch_threads: int
    cpu_features: tuple[str, ...]
    memory_available_bytes: int | None
    cuda_version: str | None
    cuda_devices: tuple[CudaDevice, ...]


def _from_proc(name: str) -> dict[str, str]:
    """Return the first value of each name in a file of ``/proc``; nothing where there is none."""
    try:
        lines = Path("/proc", name).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    return {key.strip(): value.strip() for key, separator, value in pairs if separator}


def _cpu_features(info: dict[str, str]) -> tuple[str, ...]:
    """Return the SIMD features of this CPU that a backend may care for, by their Linux names."""
    flags = set((info.get("flags") or info.get("Features") or "").split())
    if not flags:
        capability = torch.backends.cpu.get_cpu_capability()  # no /proc/cpuinfo: torch knows the main ones
        flags = {"avx2", "fma"} if capability in {"AVX2", "AVX512"} else set()
        flags |= {"avx512f"} if capability == "AVX512" else set()
    return tuple(name for name in _WATCHED_FEATURES if name in flags)


def _cuda_devices() -> tuple[CudaDevice, ...]:
    if not torch.cuda.is_available():
        return ()
    found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(
        CudaDevice(
            index=index,
            name=item.name,
            capability=(item.major, item.minor),
            total_memory_bytes=item.total_memory,
            is_integrated=bool(getattr(item, "is_integrated", False)),
        )
        for index, item in enumerate(found)
    )


def processor_facts() -> dict[str, str]:
    """Return what numbers may depend on besides code: the processor, its microcode, and all features by their hash."""
    info = _from_proc("cpuinfo")
    flags = " ".join(sorted((info.get("flags") or info.get("Features") or "").split()))
    return {
        "processor": info.get("model name", platform.processor() or platform.machine()),
        "microcode": info.get("microcode", ""),
        "features": hashlib.sha256(flags.encode()).hexdigest()[:16],
    }


def machine_facts() -> MachineFacts:
    """Return the facts of this machine; asks the CUDA driver if there is one."""
    info, available = _from_proc("cpuinfo"), _from_proc("meminfo").get("MemAvailable")  # such as "123456 kB"
    return MachineFacts(
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        processor=info.get("model name", platform.processor() or "unknown"),
        cpu_count=os.cpu_count() or 1,
        torch_threads=torch.get_num_threads(),
        cpu_features=_cpu_features(info),
        memory_available_bytes=None if available is None else int(available.split()[0]) * 1024,
        cuda_version=torch.version.cuda,
        cuda_devices=_cuda_devices(),
    )
