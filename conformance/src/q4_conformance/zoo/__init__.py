"""A right toy kernel, and the faults planted in it to prove that the kit finds them."""

from q4_conformance.zoo.catalogue import FAULTS, crashing, hanging, talking
from q4_conformance.zoo.devices import DEVICE_FAULTS
from q4_conformance.zoo.dialects import DIALECT_FAULTS
from q4_conformance.zoo.fault import DialectFault, Fault, ProviderFault
from q4_conformance.zoo.functions import FUNCTION_FAULTS, FunctionFault
from q4_conformance.zoo.providers import PROVIDER_FAULTS
from q4_conformance.zoo.toy import ToyKernel, function_of
from q4_conformance.zoo.toy_dialect import ToyDialect
from q4_conformance.zoo.toy_provider import ToyProvider
from q4_conformance.zoo.unusual import UNUSUAL

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
