"""A planted fault: plain data, with the case that must catch it. A decorator enters it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from q4_conformance.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

NF4, TAIL, LONG = (f"nf4-plain-high_first-{size}b64-s0" for size in ("48x256", "67x192", "8x14400"))
"""Weights that cases name: the usual one, one whose sizes no vector divides, and one with long rows."""
_PROBE = "probe_failed"
_Made = TypeVar("_Made")


@attrs.frozen(kw_only=True)
class Fault:
    """One planted fault.

    Args:
        name: Its name, and that of the backend, provider, dialect, reader or layer type that has it.
        make: Returns what has it, by its name, a dialect by nothing; or is the function.
        caught_by: How the id of the case starts that is meant to catch it.
        says: A part of that case's message.
        format: The format on which a backend's shows.
        passes_probe: Whether the core's self-probe lets it through, so that the case itself must see it.
        is_numeric: Whether it also shows in a bare function, without the core.
        ends: How that case ends; CRASH and TIMEOUT are seen where it runs in a process of its own.
    """

    name: str
    make: Callable[..., Any]
    caught_by: str
    says: str
    format: str = "nf4"
    passes_probe: bool = attrs.field()
    is_numeric: bool = False
    ends: Outcome = Outcome.FAIL

    @passes_probe.default
    def _passes_probe(self) -> bool:
        return self.says != _PROBE


FAULTS: list[Fault] = []
DEVICE_FAULTS: list[Fault] = []
"""Faults of what the cases of devices judge; they are judged on the CPU as well."""
DIALECT_FAULTS: list[Fault] = []
FILE_FAULTS: list[Fault] = []
PROVIDER_FAULTS: list[Fault] = []
FUNCTION_FAULTS: list[Fault] = []
LAYER_FAULTS: list[Fault] = []
PROGRAM_FAULTS: list[Fault] = []


def _planting(faults: list[Fault], prefix: str = "fault-", **usual: Any) -> Callable[..., Callable[[_Made], _Made]]:
    """Return a decorator ``(name, caught_by, says="probe_failed", **facts)`` that enters what it decorates."""

    def plant(name: str, caught_by: str, says: str = _PROBE, **facts: Any) -> Callable[[_Made], _Made]:
        def enter(make: Any) -> Any:
            faults.append(Fault(name=prefix + name, make=make, caught_by=caught_by, says=says, **usual | facts))
            if faults is DIALECT_FAULTS:
                make.name = prefix + name
            return make

        return enter

    return plant


numeric_fault = _planting(FAULTS, is_numeric=True)
backend_fault = _planting(FAULTS)
device_fault = _planting(DEVICE_FAULTS, format="nvfp4")
dialect_fault = _planting(DIALECT_FAULTS)
file_fault = _planting(FILE_FAULTS)
provider_fault = _planting(PROVIDER_FAULTS)
function_fault = _planting(FUNCTION_FAULTS, prefix="")
layer_fault = _planting(LAYER_FAULTS)
program_fault = _planting(PROGRAM_FAULTS)
