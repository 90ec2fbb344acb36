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
    FILE_FAULTS,
    LAYER_FAULTS,
    PROGRAM_FAULTS,
    PROVIDER_FAULTS,
    UNUSUAL,
    Fault,
    ToyDialect,
    ToyKernel,
    ToyProvider,
    ToyReader,
)
from q4_conformance_faults.layers import ToyLayerType
from q4core import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from q4core import Backend, Dialect, MemoryProvider

__all__ = ["MODULE", "VARIABLE", "q4_backends", "q4_checkpoint_readers", "q4_dialects", "q4_layers"]
__all__ += ["q4_memory_providers", "release"]

MODULE = "q4_conformance_faults.plugin"
VARIABLE = "Q4_CONFORMANCE_FAULTS"


def _makers(name: str, right: Callable[..., Any], faults: Iterable[Fault]) -> dict[str, Callable[..., Any]]:
    """Return name → function, of what is right and of each fault."""
    return {name: right, **{fault.name: fault.make for fault in faults}}


_BACKENDS = _makers("toy", ToyKernel, (*FAULTS, *DEVICE_FAULTS, *PROGRAM_FAULTS))
_BACKENDS |= {kernel.name: type(kernel) for kernel in UNUSUAL}
_PROVIDERS = _makers("toy-memory", ToyProvider, PROVIDER_FAULTS)
_DIALECTS = _makers(ToyDialect.name, ToyDialect, DIALECT_FAULTS)
_READERS = _makers("toy-files", ToyReader, FILE_FAULTS)
_LAYERS = _makers("toy-layer", ToyLayerType, LAYER_FAULTS)
_out: dict[str, Backend] = {}


def _named(table: Mapping[str, Any]) -> list[str]:
    """Return the names that are asked for, of those in a table."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name in table]


def release(*names: str) -> None:
    """Make plugins anew, before the registry asks for them."""
    for name in names:
        if name in _BACKENDS:
            _out[name] = _BACKENDS[name](name)


@hookimpl
def q4_backends() -> list[Backend]:
    """Return the backends that are named."""
    return [_out[name] if name in _out else _BACKENDS[name](name) for name in _named(_BACKENDS)]


@hookimpl
def q4_memory_providers() -> list[MemoryProvider]:
    """Return the providers that are named."""
    return [_PROVIDERS[name](name) for name in _named(_PROVIDERS)]


@hookimpl
def q4_dialects() -> list[Dialect]:
    """Return the dialects that are named."""
    return [_DIALECTS[name]() for name in _named(_DIALECTS)]


@hookimpl
def q4_checkpoint_readers() -> list[ToyReader]:
    """Return the readers that are named."""
    return [_READERS[name](name) for name in _named(_READERS)]


@hookimpl
def q4_layers() -> list[Any]:
    """Return the layer types that are named."""
    return [_LAYERS[name](name) for name in _named(_LAYERS)]
