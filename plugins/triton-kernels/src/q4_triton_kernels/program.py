"""``Program``: one kernel with its constants, compiled and loaded before it is launched; or interpreted."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_triton_kernels.ahead import Compiled, compile_for
from q4core import BackendError, PrepareError, Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_triton_kernels.target import Target

__all__ = ["TYPES", "Program"]

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
}
"""torch's dtypes by Triton's names."""

_INTERPRETER = threading.Lock()
"""Triton's interpreter keeps its place in the grid in one global."""

_UNBUILT = (subprocess.CalledProcessError, OSError, ImportError)
"""What Triton raises where it can't build its launcher, independent of the driver."""


@attrs.define(eq=False)
class Program:
    """A kernel with its constants for one target and one device.

    Args:
        kernel: A ``triton.jit`` function, whose constants come last.
        signature: Name → type of each argument that is no constant, in order.
        constants: Name → value of each constant, in order.
        aligned: As ``compile_for`` takes it.
        target: What runs it.
        warps: Warps per block.
        stages: Depth of the software pipeline.
        device: Index of the device that the code is loaded onto. Defaults to the current one where it is loaded.
        fuses: Whether a product and a sum may be rounded as one.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    target: Target
    warps: int
    stages: int
    device: int | None = attrs.field(default=None, kw_only=True)
    fuses: bool = attrs.field(default=True, kw_only=True)
    _launch: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    def compile(self, arch: int | None = None) -> Compiled:
        """Return what the kernel becomes on the target, or on another architecture."""
        return compile_for(
            self.kernel,
            self.signature,
            self.constants,
            self.target.arch or 0 if arch is None else arch,
            aligned=self.aligned,
            num_warps=self.warps,
            num_stages=self.stages,
            enable_fp_fusion=self.fuses,
        )

    def load(self) -> None:
        """Compile the kernel and load its code onto the device, once.

        Raises:
            PrepareError: Triton does not compile it (``TOOLCHAIN``), or the driver does not load it (``DRIVER``).
        """
        if self._launch is not None:
            return
        if self.target.is_interpreted:
            self._launch = self._interpret
            return
        try:
            handle = self.compile().handle
        except Exception as error:
            rule = f"compiled by the installed Triton for {self.target}"
            raise self._refusal(ReasonCode.TOOLCHAIN, "source", rule, error) from error
        try:
            with self._current_device() as device:
                handle._init_handles()  # noqa: SLF001  # what its first launch would do
        except _UNBUILT as error:
            raise self._refusal(ReasonCode.TOOLCHAIN, "launcher", "built by the C compiler", error) from error
        except Exception as error:
            rule = f"loaded by the driver on {self.target}"
            raise self._refusal(ReasonCode.DRIVER, "machine code", rule, error) from error
        self._launch = _launcher(handle, tuple(self.constants.values()), device)

    def _refusal(self, code: ReasonCode, name: str, rule: str, error: Exception) -> PrepareError:
        value = f"{type(error).__name__}: {error}"
        return PrepareError([Reason(code, str(BackendError(f"kernel {self.name}", name=name, rule=rule, value=value)))])

    @contextlib.contextmanager
    def _current_device(self) -> Iterator[int]:
        """Make the device the current one, and give its index."""
        from triton.runtime.driver import driver  # noqa: PLC0415  # may be missing

        before = driver.active.get_current_device()
        device = before if self.device is None else self.device
        if device != before:
            driver.active.set_current_device(device)
        try:
            yield device
        finally:
            if device != before:
                driver.active.set_current_device(before)

    def _interpret(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        with _INTERPRETER:
            self.kernel[grid](*arguments, **self.constants)

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch on the current stream. Tensors stand for their addresses.

        Code is loaded when a weight is prepared. One that was prepared elsewhere brings none: its first launch loads.

        Raises:
            BackendError: ``load`` was not called before a capture.
            PrepareError: As of ``load``.
        """
        if self._launch is None:
            if not self.target.is_interpreted and torch.cuda.is_current_stream_capturing():
                rule = "loaded before a capture"
                raise BackendError(f"kernel {self.name}", name="code", rule=rule, value="none", hint="Run it once.")
            self.load()
        if self._launch is None:
            raise TypeError("load() sets what launches")
        if not self.target.is_interpreted:
            arguments = tuple([item if type(item) is int else item.data_ptr() for item in arguments])
        self._launch(grid, *arguments)


def _launcher(handle: Any, constants: tuple[Any, ...], device: int) -> Callable[..., Any]:
    """Return what launches loaded code on torch's current stream of a device, which must be the current one.

    It calls what Triton's own ``handle[grid](...)`` calls, without making a function for each launch. Hooks of Triton's
    profilers are left out.
    """
    from triton.runtime.driver import driver  # noqa: PLC0415  # may be missing

    run, function, packed = handle.run, handle.function, handle.packed_metadata
    stream_of = driver.active.get_current_stream

    def launch(grid: tuple[int, int, int], *arguments: Any) -> None:
        run(*grid, stream_of(device), function, packed, None, None, None, *arguments, *constants)

    return launch
