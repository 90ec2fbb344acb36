"""What a planted fault is: plain data, with the case that must catch it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from q4_conformance.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_conformance_faults.toy import ToyKernel
    from q4core import Dialect, MemoryProvider

__all__ = ["DialectFault", "Fault", "ProviderFault"]


@attrs.frozen(kw_only=True)
class Fault:
    """One planted fault.

    Args:
        name: Its name, and its backend's.
        make: Returns the backend.
        format: The format on which it shows.
        caught_by: How the id of the case starts that is meant to catch it.
        says: A part of that case's message.
        passes_probe: Whether the core's self-probe lets it through, so that the case itself must see it.
        is_numeric: Whether it also shows in a bare function, without the core.
        ends: How that case ends; CRASH and TIMEOUT are seen where it runs in a process of its own.
    """

    name: str
    make: Callable[[str], ToyKernel]
    format: str
    caught_by: str
    says: str
    passes_probe: bool = True
    is_numeric: bool = True
    ends: Outcome = Outcome.FAIL


@attrs.frozen(kw_only=True)
class ProviderFault:
    """One planted fault of a memory provider; arguments as of ``Fault``."""

    name: str
    make: Callable[[str], MemoryProvider]
    caught_by: str
    says: str


@attrs.frozen(kw_only=True)
class DialectFault:
    """One planted fault of a dialect, whose name its class has; other arguments as of ``Fault``."""

    name: str
    make: Callable[[], Dialect]
    caught_by: str
    says: str
