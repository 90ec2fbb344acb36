"""A right toy kernel, and the faults planted in it to prove that the kit finds them.

A kit that never fails proves nothing. Each fault of a backend is the toy kernel with one method overridden, as by a
small mistake. Some are caught before any case's own numbers, because the core's self-probe disqualifies the path; the
case then fails because what was declared is refused. Others are made to pass the probe.
"""

import importlib

from q4_conformance_faults.correct import UNUSUAL
from q4_conformance_faults.fault import (
    DEVICE_FAULTS,
    DIALECT_FAULTS,
    FAULTS,
    FILE_FAULTS,
    FUNCTION_FAULTS,
    LAYER_FAULTS,
    PROGRAM_FAULTS,
    PROVIDER_FAULTS,
    Fault,
)
from q4_conformance_faults.lifecycle import crashing, hanging, talking
from q4_conformance_faults.toy import ToyKernel, function_of
from q4_conformance_faults.toy_dialect import ToyDialect
from q4_conformance_faults.toy_files import ToyReader
from q4_conformance_faults.toy_provider import ToyProvider

__all__ = [
    "DEVICE_FAULTS",
    "DIALECT_FAULTS",
    "FAULTS",
    "FILE_FAULTS",
    "FUNCTION_FAULTS",
    "LAYER_FAULTS",
    "PROGRAM_FAULTS",
    "PROVIDER_FAULTS",
    "UNUSUAL",
    "Fault",
    "ToyDialect",
    "ToyKernel",
    "ToyProvider",
    "ToyReader",
    "crashing",
    "function_of",
    "hanging",
    "talking",
]

for _name in ("boundary", "dense", "devices", "dialects", "files", "layers", "lifecycle", "memory"):
    importlib.import_module(f"{__name__}.{_name}")  # which enters its faults
for _name in ("programs", "providers", "shapes", "spikes", "spiking", "threads", "values", "weights"):
    importlib.import_module(f"{__name__}.{_name}")  # as above
