"""The shared libraries of ggml that llama-cpp-python carries, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

__all__ = ["GgmlLibrary"]


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _TensorHead(ctypes.Structure):
    """The first fields of a tensor; a test that the kernels take a buffer type needs the second one written."""

    _fields_ = (("type", c_int), ("buffer", c_void_p))


class _TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", c_char_p),
        ("block", c_int64),
        ("block_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
    )


class _Feature(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("value", c_char_p))


_POINTER = c_void_p
_LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)


_SILENCE = _LOG(lambda *_: None)
"""Discards ggml's log of each tensor that it repacks; it must live as long as the library."""
_BASE = {
    "ggml_init": (_POINTER, [_InitParams]),
    "ggml_log_set": (None, [_LOG, _POINTER]),
    "ggml_free": (None, [_POINTER]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_new_tensor_2d": (_POINTER, [_POINTER, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (_POINTER, [_POINTER, _POINTER, _POINTER]),
    "ggml_new_graph": (_POINTER, [_POINTER]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_get_data": (_POINTER, [_POINTER]),
    "ggml_nbytes": (c_size_t, [_POINTER]),
    "ggml_quantize_chunk": (c_size_t, [c_int, _POINTER, _POINTER, c_int64, c_int64, c_int64, _POINTER]),
    "ggml_get_type_traits": (ctypes.POINTER(_TypeTraits), [c_int]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_backend_graph_compute": (c_int, [_POINTER, _POINTER]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, [_POINTER, _POINTER]),
    "ggml_backend_buft_alloc_buffer": (_POINTER, [_POINTER, c_size_t]),
    "ggml_backend_buft_name": (c_char_p, [_POINTER]),
    "ggml_backend_buffer_free": (None, [_POINTER]),
    "ggml_backend_buffer_set_usage": (None, [_POINTER, c_int]),
    "ggml_backend_tensor_set": (None, [_POINTER, _POINTER, c_size_t, c_size_t]),
    "ggml_backend_get_default_buffer_type": (_POINTER, [_POINTER]),
    "ggml_backend_reg_dev_get": (_POINTER, [_POINTER, c_size_t]),
    "ggml_backend_reg_get_proc_address": (_POINTER, [_POINTER, c_char_p]),
    "ggml_backend_dev_supports_op": (c_bool, [_POINTER, _POINTER]),
}
_CPU = {
    "ggml_backend_cpu_init": (_POINTER, []),
    "ggml_backend_cpu_reg": (_POINTER, []),
    "ggml_backend_cpu_set_n_threads": (None, [_POINTER, c_int]),
}
_WEIGHTS_USAGE = 1


class GgmlLibrary:
    """The functions of ggml, with their types; each is an attribute under its own name.

    Raises:
        ModuleNotFoundError: llama-cpp-python is not installed.
        OSError: Its libraries can't be loaded.
    """

    def __init__(self) -> None:
        found = importlib.util.find_spec("llama_cpp")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
        folder = Path(found.origin).parent / "lib"
        for file, functions in (("libggml-base.so", _BASE), ("libggml-cpu.so", _CPU)):
            library = ctypes.CDLL(str(folder / file), mode=ctypes.RTLD_GLOBAL)
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        self.ggml_log_set(_SILENCE, None)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        """Say which function is missing."""
        raise AttributeError(f"ggml's {name} is not among the functions that are loaded here")

    def context(self, tensors: int) -> int:
        """Return a context with room for some tensors and as many graphs, whose data lie elsewhere."""
        size = tensors * (self.ggml_tensor_overhead() + self.ggml_graph_overhead()) + (1 << 16)
        made: int = self.ggml_init(_InitParams(mem_size=size, mem_buffer=None, no_alloc=True))
        return made

    @functools.cache  # noqa: B019  # one for the process
    def backend(self, threads: int) -> int:
        """Return the CPU backend for a number of threads."""
        made: int = self.ggml_backend_cpu_init()
        self.ggml_backend_cpu_set_n_threads(made, threads)
        return made

    def extra_buffer_types(self) -> list[int]:
        """Return the buffer types that store weights in another order, in the order in which llama.cpp asks them."""
        registry = self.ggml_backend_cpu_reg()
        address = self.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        ask = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)
        listed = ask(self.ggml_backend_reg_dev_get(registry, 0))
        found: list[int] = []
        while listed and (one := listed[len(found)]):
            found.append(one)
        return found

    def repacked_type(self, type_: int, out_features: int, in_features: int) -> int | None:
        """Return the buffer type in which llama.cpp would store such a weight, None where that is the plain one."""
        context = self.context(3)
        try:
            weight = self.ggml_new_tensor_2d(context, type_, in_features, out_features)
            product = self.ggml_mul_mat(context, weight, self.ggml_new_tensor_2d(context, 0, in_features, 512))
            device = self.ggml_backend_reg_dev_get(self.ggml_backend_cpu_reg(), 0)
            for kind in self.extra_buffer_types():
                buffer = self.ggml_backend_buft_alloc_buffer(kind, 0)
                _TensorHead.from_address(weight).buffer = buffer
                is_taken = self.ggml_backend_dev_supports_op(device, product)
                self.ggml_backend_buffer_free(buffer)
                if is_taken:
                    return kind
            return None
        finally:
            self.ggml_free(context)

    def allocate_weights(self, context: int, kind: int) -> int:
        """Give every tensor of a context memory in a buffer of weights, and return that."""
        buffer: int = self.ggml_backend_alloc_ctx_tensors_from_buft(context, kind)
        self.ggml_backend_buffer_set_usage(buffer, _WEIGHTS_USAGE)
        return buffer

    def features(self) -> list[str]:
        """Return the names of what the CPU backend was built for and found here."""
        address = self.ggml_backend_reg_get_proc_address(self.ggml_backend_cpu_reg(), b"ggml_backend_get_features")
        if not address:
            return []
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), c_void_p)(address)(self.ggml_backend_cpu_reg())
        found: list[str] = []
        while listed[len(found)].name:
            found.append(listed[len(found)].name.decode())
        return found

    def quantize(self, type_: int, rows: int, columns: int, address: int) -> ctypes.Array[ctypes.c_char]:
        """Return float32 [rows, columns] at an address in one of ggml's types."""
        packed = ctypes.create_string_buffer(rows * self.ggml_row_size(type_, columns))
        self.ggml_quantize_chunk(type_, address, packed, 0, rows, columns, None)
        return packed

    def dequantize(self, type_: int, packed: ctypes.Array[ctypes.c_char], values: int) -> ctypes.Array[c_float]:
        """Return the values of a packed buffer as float32."""
        decoded = (c_float * values)()
        self.ggml_get_type_traits(type_).contents.to_float(packed, decoded, values)
        return decoded
