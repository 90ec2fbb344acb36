"""The few functions of the CUDA driver that load machine code and launch it, by ctypes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import attrs

from q4_nvfp4_native.calls import ARGUMENTS_OFFSET, CALL_OFFSET, LAYOUTS
from q4core import BackendError

if TYPE_CHECKING:
    from q4_nvfp4_native.calls import GemmCall, QuantizeCall

__all__ = ["Driver", "Kernel", "find_driver"]

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_BYTES_UNASKED = 49152
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_ADDRESS = ctypes.c_void_p


def find_driver() -> Driver:
    """Return the CUDA driver of this machine.

    Raises:
        BackendError: There is none.
    """
    for name in _LIBRARIES:
        try:
            return Driver(ctypes.CDLL(name))
        except OSError:
            continue
    raise BackendError("the CUDA driver", hint="Install NVIDIA's driver: its library libcuda.so.1 is not there.")


class Driver:
    """The CUDA driver.

    Args:
        library: Its library, loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._launch: Any = library.cuLaunchKernelEx
        self._launch.argtypes = [_ADDRESS] * 4

    def load(self, machine_code: bytes, what: str) -> Any:
        """Load machine code into the current context and return its handle.

        Raises:
            BackendError: The driver refuses it: it is too old, or the code is for another device.
        """
        module = _ADDRESS()
        self._check(self._library.cuModuleLoadData(ctypes.byref(module), machine_code), f"loading {what}")
        return module

    def kernel(self, module: Any, name: str, *, threads: int, shared_bytes: int) -> Kernel:
        """Return a kernel of a module, allowed to take its shared memory.

        Raises:
            BackendError: It is not there, or wants more than the device has.
        """
        function = _ADDRESS()
        found = self._library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        self._check(found, f"finding kernel {name}")
        if shared_bytes > _SHARED_BYTES_UNASKED:
            allowed = self._library.cuFuncSetAttribute(function, _SHARED_BYTES_ATTRIBUTE, shared_bytes)
            self._check(allowed, f"giving kernel {name} {shared_bytes} bytes of shared memory")
        return Kernel(name, function.value or 0, threads, shared_bytes, self, self._context())

    def _context(self) -> Any:
        """Return the current context; None from a driver that does not report it."""
        context = _ADDRESS()
        get = getattr(self._library, "cuCtxGetCurrent", None)
        return context if get is not None and get(ctypes.byref(context)) == 0 else None

    def launch(self, kernel: Kernel, blocks: int, stream: int, call: GemmCall | QuantizeCall) -> None:
        """Launch a kernel whose one argument is a structure; returns at once."""
        layout = LAYOUTS[type(call)]
        buffer = ctypes.create_string_buffer(layout.size)
        start = ctypes.addressof(buffer)
        shape = (blocks, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes)
        layout.pack_into(buffer, 0, *shape, stream, 0, 0, start + CALL_OFFSET, *call)
        arguments = (start, kernel.function, start + ARGUMENTS_OFFSET, None)
        status = self._launch(*arguments)
        if status == _NO_CONTEXT and kernel.context is not None:
            # A thread that has used no CUDA yet has no current context, and torch sets one only when it calls CUDA.
            self._check(self._library.cuCtxSetCurrent(kernel.context), "entering the device's context")
            status = self._launch(*arguments)
        if status:
            self._check(status, f"launching {kernel.name}")

    def _check(self, status: int, doing: str) -> None:
        if status:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(name))
            answer = name.value.decode() if name.value else "unknown"
            raise BackendError(f"{doing}: the CUDA driver returned {answer} ({status})", status=status)


@attrs.frozen(eq=False)
class Kernel:
    """A loaded kernel, and how its blocks are shaped."""

    name: str
    function: int
    threads: int
    shared_bytes: int
    driver: Driver = attrs.field(repr=False)
    context: Any = attrs.field(repr=False)

    def launch(self, blocks: int, stream: int, call: GemmCall | QuantizeCall) -> None:
        """Launch it on a stream of the device that it was loaded for."""
        self.driver.launch(self, blocks, stream, call)
