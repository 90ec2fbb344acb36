"""Which instruction set runs: the one asked for, or the best that this machine has and that is trusted unasked."""

from __future__ import annotations

import functools
from typing import Any

import attrs

from q4core import ReasonCode

__all__ = ["Isa", "choose", "native"]

_ABI_VERSION = 6
_FAMILIES = 3  # exact, w4a8, w4i16
_HERE, _NOT_BUILT = 1, -1


@attrs.frozen
class Isa:
    """The instruction set that runs, or why there is none.

    Args:
        number: What the native calls know it by; 0 where there is none.
        told: Its name; where there is none, what is missing and what to do.
        code: The kind of refusal where there is none.
        panels_from: For each family of kernels, the rows of x from which others serve than for fewer; 0 where none do.
        was_run: Whether its kernels have run on such hardware.
    """

    number: int
    told: str
    code: ReasonCode = ReasonCode.ARCH
    panels_from: tuple[int, ...] = ()
    was_run: bool = False


@functools.cache
def native() -> Any:
    """Return the native module, or the error that loading it gave."""
    try:
        from q4_cpu_native import _native as module  # noqa: PLC0415  # missing where it was not built
    except ImportError as error:
        return error
    return module


def choose(wish: str) -> Isa:
    """Return the instruction set of that name; with no name, the best one that needs no asking."""
    module = native()
    if isinstance(module, ImportError):
        way_out = "install q4-cpu-native again, from its wheel or with a C++17 compiler that has OpenMP"
        told = f"the native module is not built or can't be loaded ({module}); {way_out}"
        return Isa(0, told, ReasonCode.NOT_BUILT)
    if module.ABI_VERSION != _ABI_VERSION:
        told = f"the native module has ABI {module.ABI_VERSION}, and {_ABI_VERSION} is wanted"
        return Isa(0, f"{told}; install q4-cpu-native again", ReasonCode.NOT_BUILT)
    numbers = _numbers(module)
    if wish:
        return _wished(module, numbers, wish)
    best = module.best_isa()
    return _isa(module, best) if best else _none(module, numbers)


def _isa(module: Any, number: int) -> Isa:
    panels_from = tuple(module.panel_from(number, family) for family in range(_FAMILIES))
    name = module.isa_name(number)
    return Isa(number, name, panels_from=panels_from, was_run=bool(module.isa_was_run(number)))


def _numbers(module: Any) -> dict[str, int]:
    """Return the number of each instruction set that there is, the preferred ones last."""
    numbers: dict[str, int] = {}
    while (name := module.isa_name(len(numbers) + 1)) is not None:
        numbers[name] = len(numbers) + 1
    return numbers


def _wished(module: Any, numbers: dict[str, int], wish: str) -> Isa:
    if wish not in numbers:
        return Isa(0, f"Q4_CPU_ISA must be one of {', '.join(numbers)}, got {wish!r}", ReasonCode.POLICY)
    state = module.has_isa(numbers[wish])
    if state == _NOT_BUILT:
        told = f"Q4_CPU_ISA asks for {wish}, for which the native module was built without kernels"
        return Isa(0, told, ReasonCode.NOT_BUILT)
    if state != _HERE:
        return Isa(0, f"Q4_CPU_ISA asks for {wish}, which this machine has not")
    return _isa(module, numbers[wish])


def _none(module: Any, numbers: dict[str, int]) -> Isa:
    """Say why nothing runs unasked, and what to ask for where something would."""
    here = [name for name, number in numbers.items() if module.has_isa(number) == _HERE]
    if here:  # and best_isa took none of them
        told = (
            f"the kernels for {' and '.join(here)} have not been run on hardware yet, so they run only when asked for"
        )
        return Isa(0, f"{told}; set Q4_CPU_ISA={here[-1]} to use them", ReasonCode.POLICY)
    built = [name for name, number in numbers.items() if module.has_isa(number) != _NOT_BUILT]
    if not built:
        return Isa(0, "the native module was built without kernels for this kind of processor", ReasonCode.NOT_BUILT)
    return Isa(0, f"this machine has none of the instruction sets that there are kernels for: {', '.join(built)}")
