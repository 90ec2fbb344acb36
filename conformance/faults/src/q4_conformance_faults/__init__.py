"""A right toy kernel, and the faults planted in it to prove that the kit finds them."""

from q4_conformance_faults.catalogue import FAULTS, crashing, hanging, talking
from q4_conformance_faults.devices import DEVICE_FAULTS
from q4_conformance_faults.dialects import DIALECT_FAULTS
from q4_conformance_faults.fault import DialectFault, Fault, ProviderFault
from q4_conformance_faults.functions import FUNCTION_FAULTS, FunctionFault
from q4_conformance_faults.providers import PROVIDER_FAULTS
from q4_conformance_faults.toy import ToyKernel, function_of
from q4_conformance_faults.toy_dialect import ToyDialect
from q4_conformance_faults.toy_provider import ToyProvider
from q4_conformance_faults.unusual import UNUSUAL

__all__ = [
    "DEVICE_FAULTS",
    "DIALECT_FAULTS",
    "FAULTS",
    "FUNCTION_FAULTS",
    "PROVIDER_FAULTS",
    "UNUSUAL",
    "DialectFault",
    "Fault",
    "FunctionFault",
    "ProviderFault",
    "ToyDialect",
    "ToyKernel",
    "ToyProvider",
    "crashing",
    "function_of",
    "hanging",
    "talking",
]
