"""Policies, and the configuration of a session."""

from q4core.policy.config import (
    ActivationPrecision,
    ComputePath,
    Rounding,
    SessionConfig,
    UnifiedMemoryPolicy,
    resolve_config,
    to_option,
    using,
)

__all__ = [
    "ActivationPrecision",
    "ComputePath",
    "Rounding",
    "SessionConfig",
    "UnifiedMemoryPolicy",
    "resolve_config",
    "to_option",
    "using",
]
