"""The checks that cases name. Importing this package enters all of them into ``table.CHECKS``."""

from q4_conformance.checks import (
    calls,
    core,
    device,
    dialect,
    dtypes,
    endurance,
    layer,
    lifetime,
    managed,
    mutable,
    plugins,
    policy,
    rounding,
    steady,
    tracing,
    values,
)

__all__ = [
    "calls",
    "core",
    "device",
    "dialect",
    "dtypes",
    "endurance",
    "layer",
    "lifetime",
    "managed",
    "mutable",
    "plugins",
    "policy",
    "rounding",
    "steady",
    "tracing",
    "values",
]
