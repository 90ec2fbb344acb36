"""q4core: any 4-bit checkpoint loads, the fastest backend proven correct on this machine runs it, and says so.

The names below are the public contract; plugins and the conformance kit use nothing else. Importing loads no plugin and
touches no device and no network.
"""

from typing import TYPE_CHECKING, Any

from q4core import errors, memory
from q4core.backend import (
    API_VERSION,
    EVERY_FORMAT,
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
    Segment,
    Support,
    Tier,
)
from q4core.checkpoint import Checkpoint, CheckpointReader, CheckpointSource, CheckpointWriter, OpenRequest, SaveRequest
from q4core.codec import dequantize
from q4core.errors import (
    BackendError,
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    DialectError,
    FormatError,
    InputError,
    LifecycleError,
    PackedWeightError,
    PluginError,
    PoisonedError,
    PolicyConflictError,
    PrepareError,
    Q4Error,
    Q4FallbackWarning,
    Q4PluginWarning,
    Q4ProbeWarning,
    Q4Warning,
    SchemaError,
    UnifiedMemoryError,
    UnknownBackendError,
    UnknownDialectError,
    WeightError,
    WriteConflictError,
)
from q4core.formats import (
    BUILTIN_FORMATS,
    BlockOrder,
    Form,
    Format,
    NibbleOrder,
    Packing,
    ScaleKind,
    find_format,
    pack_codes,
    resolve_levels,
    unpack_codes,
)
from q4core.layers.diagnosis import Diagnostics, Report
from q4core.layers.linear import Q4Linear
from q4core.layers.weight_info import WeightInfo
from q4core.machine.facts import MachineFacts, machine_facts
from q4core.memory import MemoryDecision, MemoryProvider
from q4core.moved import getattr_of
from q4core.plugins.discovery import PluginRecord
from q4core.plugins.hooks import hookimpl
from q4core.plugins.registry import Registry, default_registry, reset_registry
from q4core.policy.config import (
    ActivationPrecision,
    ComputePath,
    Rounding,
    SessionConfig,
    UnifiedMemoryPolicy,
    resolve_config,
    using,
)
from q4core.probes.comparison import error_bound
from q4core.probes.linear import grid_activations
from q4core.schema import Catalogue, Dialect, LayerSchema, Problem, Schema, TensorInfo, WrittenLayer
from q4core.selection.probe_results import ProbeResult
from q4core.selection.result import Rejection, Selection
from q4core.session.detecting import detect, detect_all, detect_or_fail, validate
from q4core.session.functions import (
    dialects,
    open,  # noqa: A004  # the contract's name: q4.open(path)
    save_checkpoint,
)
from q4core.session.quantizing import Quantizer, quantize
from q4core.session.session import Session, adopt_prepared, default_session, explain, export_prepared, linear, select
from q4core.weight import Cover, Feature, PackedWeight, WeightSpec, cat

__version__ = "0.1.0.dev0"

_MOVED = {
    "MutableMode": "q4_actors",
    "MutableTensor": "q4_actors",
    "SharedMutableTensor": "q4_actors",
    "ConversionTable": "q4_nn",
    "convert_linears_": "q4_nn",
    "training": "q4_nn",
}
"""Names that were the core's → the package that has them now, under the same name."""

_MODULES = {"programs": "q4_programs", "spikes": "q4_snn.products"}
"""Submodules that were the core's → what they are now: attributes where the package is installed."""

if TYPE_CHECKING:
    programs: Any
    spikes: Any
else:  # for a checker, a name that is not here stays an error
    __getattr__ = getattr_of(__name__, _MOVED, _MODULES)


__all__ = [
    "API_VERSION",
    "BUILTIN_FORMATS",
    "EVERY_FORMAT",
    "ActivationPrecision",
    "Backend",
    "BackendError",
    "BackendUnavailableError",
    "BlockOrder",
    "Capabilities",
    "Catalogue",
    "Checkpoint",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointSource",
    "CheckpointWriter",
    "ComputePath",
    "ConfigError",
    "Cover",
    "Diagnostics",
    "Dialect",
    "DialectError",
    "Feature",
    "Form",
    "Format",
    "FormatError",
    "InputError",
    "KernelPath",
    "LayerSchema",
    "LifecycleError",
    "MachineFacts",
    "MemoryDecision",
    "MemoryProvider",
    "NibbleOrder",
    "OpenRequest",
    "PackedWeight",
    "PackedWeightError",
    "Packing",
    "PathKind",
    "PluginError",
    "PluginRecord",
    "PoisonedError",
    "PolicyConflictError",
    "Precision",
    "PrepareContext",
    "PrepareError",
    "Prepared",
    "ProbeResult",
    "Problem",
    "Q4Error",
    "Q4FallbackWarning",
    "Q4Linear",
    "Q4PluginWarning",
    "Q4ProbeWarning",
    "Q4Warning",
    "Quantizer",
    "Reason",
    "ReasonCode",
    "Registry",
    "Rejection",
    "Report",
    "Request",
    "Rounding",
    "SaveRequest",
    "ScaleKind",
    "Schema",
    "SchemaError",
    "Segment",
    "Selection",
    "Session",
    "SessionConfig",
    "Support",
    "TensorInfo",
    "Tier",
    "UnifiedMemoryError",
    "UnifiedMemoryPolicy",
    "UnknownBackendError",
    "UnknownDialectError",
    "WeightError",
    "WeightInfo",
    "WeightSpec",
    "WriteConflictError",
    "WrittenLayer",
    "adopt_prepared",
    "cat",
    "default_registry",
    "default_session",
    "dequantize",
    "detect",
    "detect_all",
    "detect_or_fail",
    "dialects",
    "error_bound",
    "errors",
    "explain",
    "export_prepared",
    "find_format",
    "grid_activations",
    "hookimpl",
    "linear",
    "machine_facts",
    "memory",
    "open",
    "pack_codes",
    "quantize",
    "reset_registry",
    "resolve_config",
    "resolve_levels",
    "save_checkpoint",
    "select",
    "unpack_codes",
    "using",
    "validate",
]
