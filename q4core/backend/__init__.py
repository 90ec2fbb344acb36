"""The contract of backends, between the core and what computes.

A backend has few duties; the core does everything else (registered op, fake kernel, autograd, flattening of leading
dimensions, ``out=``, M = 0, device guard, current stream, input checks), once, for all. ``docs/backend-api.md`` is the
same contract on one page.
"""

from q4core.backend.capabilities import EVERY_FORMAT, Capabilities
from q4core.backend.contract import API_VERSION, SERVED_VERSIONS, Backend, PrepareContext, Prepared
from q4core.backend.request import Features, Request
from q4core.backend.support import KernelPath, PathKind, Precision, Reason, ReasonCode, Segment, Support, Tier

__all__ = [
    "API_VERSION",
    "EVERY_FORMAT",
    "SERVED_VERSIONS",
    "Backend",
    "Capabilities",
    "Features",
    "KernelPath",
    "PathKind",
    "Precision",
    "PrepareContext",
    "Prepared",
    "Reason",
    "ReasonCode",
    "Request",
    "Segment",
    "Support",
    "Tier",
]
