"""q4core: any 4-bit checkpoint loads, the fastest backend proven correct on this machine runs it, and says so.

The names below are the public contract; plugins and the conformance kit use nothing else. Importing loads no plugin and
touches no device and no network.
"""

from q4core import errors, memory, training
from q4core.backend import (
    API_VERSION,
    Backend,
    Capabilities,
    KernelPath,
    PathKind,
    Precision,
    PrepareContext,
    Prepared,
    Reason,
    ReasonCode,
    Request,
    Tier,
    Verdict,
)
from q4core.codec import dequantize, quantize
from q4core.convert import ConversionTable, convert_linears_
from q4core.diagnostics import Diagnostics, Report
from q4core.dispatch import Rejection, Segment, Selection
from q4core.errors import (
    BackendError,
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    DialectError,
    FormatError,
    InputError,
    LifecycleError,
    PluginError,
    PoisonedError,
    PolicyConflictError,
    Q4Error,
    Q4FallbackWarning,
    Q4PluginWarning,
    Q4ProbeWarning,
    Q4Warning,
    SchemaError,
    UnifiedMemoryError,
    UnknownBackendError,
    WeightError,
    WriteConflictError,
)
from q4core.formats import BUILTIN_FORMATS, BlockOrder, Form, Format, ScaleKind, find_format, resolve_levels
from q4core.hooks import hookimpl
from q4core.linear import Q4Linear, WeightInfo
from q4core.memory import MemoryDecision, MemoryProvider
from q4core.packing import NibbleOrder, Packing, pack_codes, unpack_codes
from q4core.policy import (
    ActivationPrecision,
    ComputePath,
    SessionConfig,
    UnifiedMemoryPolicy,
    resolve_config,
    using,
)
from q4core.probe import ProbeResult, error_bound, grid_activations
from q4core.registry import PluginRecord, Registry, default_registry, reset_registry
from q4core.runtime import MachineFacts, machine_facts
from q4core.session import Session, default_session, explain, linear, select
from q4core.weight import Feature, PackedWeight, cat
from q4core.weight_spec import WeightSpec

__version__ = "0.1.0.dev0"

__all__ = [
    "API_VERSION",
    "BUILTIN_FORMATS",
    "ActivationPrecision",
    "Backend",
    "BackendError",
    "BackendUnavailableError",
    "BlockOrder",
    "Capabilities",
    "CheckpointError",
    "ComputePath",
    "ConfigError",
    "ConversionTable",
    "Diagnostics",
    "DialectError",
    "Feature",
    "Form",
    "Format",
    "FormatError",
    "InputError",
    "KernelPath",
    "LifecycleError",
    "MachineFacts",
    "MemoryDecision",
    "MemoryProvider",
    "NibbleOrder",
    "PackedWeight",
    "Packing",
    "PathKind",
    "PluginError",
    "PluginRecord",
    "PoisonedError",
    "PolicyConflictError",
    "Precision",
    "PrepareContext",
    "Prepared",
    "ProbeResult",
    "Q4Error",
    "Q4FallbackWarning",
    "Q4Linear",
    "Q4PluginWarning",
    "Q4ProbeWarning",
    "Q4Warning",
    "Reason",
    "ReasonCode",
    "Registry",
    "Rejection",
    "Report",
    "Request",
    "ScaleKind",
    "SchemaError",
    "Segment",
    "Selection",
    "Session",
    "SessionConfig",
    "Tier",
    "UnifiedMemoryError",
    "UnifiedMemoryPolicy",
    "UnknownBackendError",
    "Verdict",
    "WeightError",
    "WeightInfo",
    "WeightSpec",
    "WriteConflictError",
    "cat",
    "convert_linears_",
    "default_registry",
    "default_session",
    "dequantize",
    "error_bound",
    "errors",
    "explain",
    "find_format",
    "grid_activations",
    "hookimpl",
    "linear",
    "machine_facts",
    "memory",
    "pack_codes",
    "quantize",
    "reset_registry",
    "resolve_config",
    "resolve_levels",
    "select",
    "training",
    "unpack_codes",
    "using",
]
