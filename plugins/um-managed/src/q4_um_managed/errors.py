"""Error of the CUDA runtime's calls."""

from __future__ import annotations

from q4core import UnifiedMemoryError

__all__ = ["DriverFaultError"]


class DriverFaultError(UnifiedMemoryError):
    """A call of CUDA's runtime failed; ``details`` has the ``call`` and the runtime's ``status``."""
