"""The planted faults as a plugin: brings what ``Q4_CONFORMANCE_FAULTS`` names, as an installed plugin brings its own.

Q4_PLUGIN_MODULES=q4_conformance_faults.plugin Q4_CONFORMANCE_FAULTS=fault-ignores-bias q4 conform fault-ignores-bias
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from q4_conformance_faults import (
    DEVICE_FAULTS,
    DIALECT_FAULTS,
    FAULTS,
    LAYER_FAULTS,
    PROGRAM_FAULTS,
    PROVIDER_FAULTS,
    UNUSUAL,
    ToyDialect,
    ToyKernel,
    ToyProvider,
)
from q4_conformance_faults.layers import ToyLayerType
from q4core import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4core import Backend, Dialect, MemoryProvider

__all__ = ["MODULE", "VARIABLE", "q4_backends", "q4_dialects", "q4_layers", "q4_memory_providers", "release"]

MODULE = "q4_conformance_faults.plugin"
VARIABLE = "Q4_CONFORMANCE_FAULTS"

_BACKENDS: dict[str, Callable[[str], Backend]] = {
    "toy": ToyKernel,
    **{fault.name: fault.make for fault in (*FAULTS, *DEVICE_FAULTS, *PROGRAM_FAULTS)},
    **{kernel.name: type(kernel) for kernel in UNUSUAL},
}
_PROVIDERS: dict[str, Callable[[str], MemoryProvider]] = {
    "toy-memory": ToyProvider,
    **{fault.name: fault.make for fault in PROVIDER_FAULTS},
}
_DIALECTS: dict[str, Callable[[], Dialect]] = {
    ToyDialect.name: ToyDialect,
    **{fault.name: fault.make for fault in DIALECT_FAULTS},
}
_LAYERS: dict[str, Callable[[str], Any]] = {
    "toy-layer": ToyLayerType,
    **{fault.name: fault.make for fault in LAYER_FAULTS},
}
_out: dict[str, Backend] = {}


def _named() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def release(*names: str) -> None:
    """Make plugins anew, before the registry asks for them."""
    for name in names:
        if name in _BACKENDS:
            _out[name] = _BACKENDS[name](name)


@hookimpl
def q4_backends() -> list[Backend]:
    """Return the backends that are named."""
    return [_out[name] if name in _out else _BACKENDS[name](name) for name in _named() if name in _BACKENDS]


@hookimpl
def q4_memory_providers() -> list[MemoryProvider]:
    """Return the providers that are named."""
    return [_PROVIDERS[name](name) for name in _named() if name in _PROVIDERS]


@hookimpl
def q4_dialects() -> list[Dialect]:
    """Return the dialects that are named."""
    return [_DIALECTS[name]() for name in _named() if name in _DIALECTS]


@hookimpl
def q4_layers() -> list[Any]:
    """Return the layer types that are named."""
    return [_LAYERS[name](name) for name in _named() if name in _LAYERS]
