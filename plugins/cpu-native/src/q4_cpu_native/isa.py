"""Choice of the instruction set: the requested one, or the best of this machine that has run on hardware."""

from __future__ import annotations

import functools
from typing import Any

import attrs

from q4core import ReasonCode

__all__ = ["Isa", "choose", "native"]

_ABI_VERSION = 14
_FAMILIES = 3  # exact, w4a8, w4i16
_HERE, _NOT_BUILT = 1, -1
_BUILD_ALL = "install q4-cpu-native again with every set (in a clone: nox -s env)"


@attrs.frozen
class Isa:
    """The instruction set that runs, or the reason why there is none.

    Args:
        number: Its number in native calls; 0 where there is none.
        text: Its name; where there is none, what is missing and what to do.
        code: The reason code where there is none.
        panels_from: For each family of kernels, the rows of x from which panel kernels run; 0 where there are none.
        was_run: Whether its kernels have run on such hardware.
        left_out: The sets of this kind of processor for which no kernels were compiled.
    """

    number: int
    text: str
    code: ReasonCode = ReasonCode.ARCH
    panels_from: tuple[int, ...] = ()
    was_run: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """What is loaded, in a few words: ``loaded (avx2)``, and what was not compiled or never run."""
        facts = [self.text if self.was_run else f"{self.text}, never run on such hardware"]
        if self.left_out:
            facts.append(f"not compiled: {', '.join(self.left_out)}")
        return f"loaded ({'; '.join(facts)})"


@functools.cache
def native() -> Any:
    """Return the native module, or the error that loading it gave."""
    try:
        from q4_cpu_native import _native as module  # noqa: PLC0415  # missing where it was not built
    except ImportError as error:
        return error
    return module


def choose(requested: str) -> Isa:
    """Return the instruction set of that name; with no name, the best one that has run on hardware."""
    module = native()
    if isinstance(module, ImportError):
        hint = "install q4-cpu-native again, from its wheel or with a C++17 compiler that has OpenMP"
        text = f"the native module is not built or can't be loaded ({module}); {hint}"
        return Isa(0, text, ReasonCode.NOT_BUILT)
    if module.ABI_VERSION != _ABI_VERSION:
        text = f"the native module has ABI {module.ABI_VERSION}, but ABI {_ABI_VERSION} is required"
        return Isa(0, f"{text}; install q4-cpu-native again", ReasonCode.NOT_BUILT)
    numbers = _numbers(module)
    if requested:
        return _requested(module, numbers, requested)
    best = module.best_isa()
    return _isa(module, numbers, best) if best else _none(module, numbers)


def _isa(module: Any, numbers: dict[str, int], number: int) -> Isa:
    panels_from = tuple(module.panel_from(number, family) for family in range(_FAMILIES))
    name, was_run = module.isa_name(number), bool(module.isa_was_run(number))
    return Isa(number, name, panels_from=panels_from, was_run=was_run, left_out=_left_out(module, numbers))


def _left_out(module: Any, numbers: dict[str, int]) -> tuple[str, ...]:
    """Return the sets without kernels of the kind of processor, x86 or Arm, that the others are of."""
    built = [name for name, number in numbers.items() if module.has_isa(number) != _NOT_BUILT]
    is_arm = any(_is_arm(name) for name in built)
    return tuple(name for name in numbers if built and name not in built and _is_arm(name) == is_arm)


def _is_arm(name: str) -> bool:
    return name.startswith("neon")


def _numbers(module: Any) -> dict[str, int]:
    """Return the number of each known instruction set, the preferred ones last."""
    numbers: dict[str, int] = {}
    while (name := module.isa_name(len(numbers) + 1)) is not None:
        numbers[name] = len(numbers) + 1
    return numbers


def _requested(module: Any, numbers: dict[str, int], name: str) -> Isa:
    if name not in numbers:
        return Isa(0, f"Q4_CPU_ISA must be one of {', '.join(numbers)}, got {name!r}", ReasonCode.POLICY)
    state = module.has_isa(numbers[name])
    if state == _NOT_BUILT:
        text = f"Q4_CPU_ISA requests {name}, for which the native module was built without kernels"
        way_out = f"; {_BUILD_ALL}, by a compiler that knows {name}" if name in _left_out(module, numbers) else ""
        return Isa(0, f"{text}{way_out}", ReasonCode.NOT_BUILT)
    if state != _HERE:
        return Isa(0, f"Q4_CPU_ISA requests {name}, which this machine does not support")
    return _isa(module, numbers, numbers[name])


def _none(module: Any, numbers: dict[str, int]) -> Isa:
    """Return the reason why nothing runs by default, and the value of Q4_CPU_ISA that enables kernels, if any."""
    here = [name for name, number in numbers.items() if module.has_isa(number) == _HERE]
    if here:  # and best_isa took none of them
        text = f"the kernels for {' and '.join(here)} have not been run on hardware yet, so they run only on request"
        return Isa(0, f"{text}; set Q4_CPU_ISA={here[-1]} to use them", ReasonCode.POLICY)
    built = [name for name, number in numbers.items() if module.has_isa(number) != _NOT_BUILT]
    if not built:
        return Isa(0, "the native module was built without kernels for this kind of processor", ReasonCode.NOT_BUILT)
    text = f"this machine supports none of the instruction sets that have kernels: {', '.join(built)}"
    if left_out := _left_out(module, numbers):
        return Isa(0, f"{text}; not compiled: {', '.join(left_out)}; {_BUILD_ALL}", ReasonCode.NOT_BUILT)
    return Isa(0, text)
