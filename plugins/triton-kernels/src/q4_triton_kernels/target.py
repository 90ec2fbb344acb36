"""Target of the kernels: a supported architecture, Triton's interpreter, or every reason why there is none."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
from importlib import metadata
from typing import TYPE_CHECKING

import attrs
import torch

from q4core import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ARCHITECTURES", "LOWEST_TRITON", "Facts", "Target", "driver_version", "machine_facts"]

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, 121)
"""Compute capabilities × 10 that the kernels are compiled and checked for; no other one is served."""
LOWEST_TRITON = (3, 6)
"""The oldest Triton that the kernels were compiled with."""
_COMPILERS = ("gcc", "clang", "cc")
_INTERPRETED_PROCESSORS = 8
"""So few that small weights show sums that are cut and sums that are not."""
_CUDA_MAJOR = 1000  # of the driver's version number: 13020 is 13.2


@attrs.frozen
class Target:
    """Where kernels run.

    Args:
        arch: Compute capability × 10, such as 90; None in Triton's interpreter.
        processors: Multiprocessors of the device, by which sums are cut.
    """

    arch: int | None
    processors: int = _INTERPRETED_PROCESSORS

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter computes, on CPU tensors."""
        return self.arch is None

    def __str__(self) -> str:
        """Return ``sm_90`` and the like, or ``interpreted``."""
        return "interpreted" if self.arch is None else f"sm_{self.arch}"


def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@attrs.frozen(kw_only=True)
class Facts:
    """What decides whether the kernels may run here; a test makes its own.

    Args:
        torch_cuda: CUDA version that torch was built for; None for a build without CUDA.
        is_cuda_available: Whether torch finds a device that it can use.
        driver: Newest CUDA version that the driver serves, as 1000 × major + 10 × minor; None where there is no driver.
        triton: Version of the installed Triton; None where there is none.
        is_interpreted: Whether ``TRITON_INTERPRET=1`` holds, so that kernels compute on CPU tensors.
        has_compiler: Whether there is a C compiler, which Triton builds its launcher with.
        capability: Returns the compute capability of a device by its index.
        processors: Returns how many multiprocessors a device has, by its index.
    """

    torch_cuda: str | None
    is_cuda_available: bool
    driver: int | None
    triton: str | None
    is_interpreted: bool = False
    has_compiler: bool = True
    capability: Callable[[int], tuple[int, int]] = attrs.field(default=torch.cuda.get_device_capability, repr=False)
    processors: Callable[[int], int] = attrs.field(default=_processors, repr=False)

    def target(self, device: torch.device) -> Target | tuple[Reason, ...]:
        """Return what runs kernels on a device, or all the reasons why nothing does.

        Args:
            device: Of type ``"cuda"``, or ``"cpu"`` in the interpreter.
        """
        reasons = [*self._toolchain()]
        if self.is_interpreted:
            if device.type != "cpu":
                message = "TRITON_INTERPRET=1 computes on CPU tensors; unset it to use the GPU"
                reasons.append(Reason(ReasonCode.TOOLCHAIN, message))
            return tuple(reasons) or Target(None)
        reasons += self._hardware()
        if not self.has_compiler:
            message = "Triton builds its launcher with a C compiler, and there is none: install gcc, or set CC"
            reasons.append(Reason(ReasonCode.TOOLCHAIN, message))
        if not self.is_cuda_available:
            return tuple(reasons)
        index = device.index if device.index is not None else torch.cuda.current_device()
        major, minor = self.capability(index)
        arch = 10 * major + minor
        if arch not in ARCHITECTURES:
            served = ", ".join(f"sm_{item}" for item in ARCHITECTURES)
            reasons.append(Reason(ReasonCode.ARCH, f"the device is sm_{arch}; the kernels are made for {served}"))
        return tuple(reasons) or Target(arch, self.processors(index))

    def _toolchain(self) -> list[Reason]:
        lowest = ".".join(map(str, LOWEST_TRITON))
        if self.triton is None:
            return [Reason(ReasonCode.TOOLCHAIN, f"Triton is not installed; torch's CUDA wheels bring it (≥ {lowest})")]
        if _version(self.triton) < LOWEST_TRITON:
            return [Reason(ReasonCode.TOOLCHAIN, f"Triton {self.triton} is too old: {lowest} or newer is needed")]
        return []

    def _hardware(self) -> list[Reason]:
        if self.torch_cuda is None:
            return [Reason(ReasonCode.DEVICE, "this torch was built without CUDA")]
        if self.driver is None:
            return [Reason(ReasonCode.DRIVER, "no NVIDIA driver answers")]
        if self.driver // _CUDA_MAJOR < int(self.torch_cuda.split(".")[0]):
            served = f"{self.driver // _CUDA_MAJOR}.{self.driver % _CUDA_MAJOR // 10}"
            message = f"the driver serves CUDA {served} at most, and torch needs {self.torch_cuda}: update the driver"
            return [Reason(ReasonCode.DRIVER, message)]
        if not self.is_cuda_available:
            return [Reason(ReasonCode.DEVICE, "torch finds no CUDA device that it can use")]
        return []


def _version(text: str) -> tuple[int, ...]:
    """Return major and minor of a version text; a part that is no number counts as 0."""
    parts = [*text.split("+", maxsplit=1)[0].split("."), "0"][:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


def _triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def driver_version(library: str = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1") -> int | None:
    """Return the newest CUDA version that the driver serves, as 13020 for 13.2; None where no driver answers.

    Args:
        library: Name of the driver's library.
    """
    found = ctypes.c_int(0)
    try:
        status = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return None
    return None if status else found.value or None


@functools.cache
def machine_facts() -> Facts:
    """Return the facts of this process; asked once."""
    return Facts(
        torch_cuda=torch.version.cuda,
        is_cuda_available=torch.cuda.is_available(),
        driver=driver_version(),
        triton=_triton_version(),
        is_interpreted=os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes"},
        has_compiler="CC" in os.environ or any(map(shutil.which, _COMPILERS)),
    )
