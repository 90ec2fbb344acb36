"""``Machine``: CUDA's runtime, found once, its devices' attributes, and the memory that they allow."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from q4_um_managed.device_attributes import UNASKED, choose
from q4_um_managed.driver import Driver
from q4_um_managed.probe_driver import Missing, Prospect
from q4core import ConfigError, UnifiedMemoryError
from q4core.memory import Availability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

__all__ = ["Machine"]


class Machine:
    """CUDA's runtime and its devices. Nothing is loaded or asked until the first question; answers are remembered.

    Args:
        find: Finds CUDA's runtime or a probe of it, or reports what is missing.
    """

    def __init__(self, find: Callable[[], Driver | Prospect | Missing]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._found: Driver | Prospect | Missing | None = None
        self._probed: tuple[dict[str, int | None], ...] = ()  # by the driver's library, of each device
        self._facts: dict[int, dict[str, int]] = {}
        self._answers: dict[tuple[str, int | None], Availability] = {}

    def driver_if_any(self) -> Driver | None:
        """Return CUDA's runtime, or None where there is none."""
        if isinstance(self._found, Missing):
            return None
        try:
            return self.driver()
        except UnifiedMemoryError:
            return None

    def driver(self) -> Driver:
        """Return CUDA's runtime.

        Raises:
            UnifiedMemoryError: There is none; the facts are in its attributes.
        """
        with self._lock:
            if os.getpid() != self._process and isinstance(self._found, Driver | Prospect):
                raise UnifiedMemoryError(
                    "unified memory",
                    name="process",
                    rule="the one that first used CUDA",
                    value="a fork of it",
                    hint="Start processes by spawn.",
                    attributes={"is_fork": True},
                )
            found = self._look()
            if isinstance(found, Prospect):
                found = self._found = found.load()
        if isinstance(found, Missing):
            raise UnifiedMemoryError(found.reason, attributes=found.facts)
        return found

    def _look(self) -> Driver | Prospect | Missing:
        """Return what there is, looked for once; the lock is held. CUDA's runtime is not loaded for it."""
        if self._found is None:
            self._found = self._find()
            self._process = os.getpid()
            if isinstance(self._found, Prospect):
                self._probed = self._found.devices
        return self._found

    def _values(self, index: int | None) -> Mapping[str, int | None]:
        """Return what the driver's library reports of a device, where CUDA's runtime reports nothing."""
        known = self._probed[index or 0 : (index or 0) + 1]
        return known[0] if known else UNASKED

    def index(self, device: torch.device) -> int:
        """Return the number of a CUDA device; of the CPU, and of one without a number, the current one's.

        Raises:
            ConfigError: It is another device.
            UnifiedMemoryError: There is no driver to ask for the current one.
        """
        kind, index = device.type, None
        if kind == "cuda":
            index = device.index
        elif kind != "cpu":
            raise ConfigError("managed memory", name="device", rule="the CPU or a CUDA device", value=str(device))
        return self.driver().current_device() if index is None else index

    def attributes(self, index: int) -> dict[str, int]:
        """Return a device's attributes, asked for once."""
        known = self._facts.get(index)
        if known is None:
            known = self._facts[index] = self.driver().attributes(index)
        return known

    def availability(self, device: torch.device) -> Availability:
        """Return whether managed memory can be had that ``device`` reaches, and by which attributes."""
        index: int | None = device.index  # torch says that it is never None
        if index is None and isinstance(self._found, Driver):
            index = self._current()
        key = (device.type, index)
        answer = self._answers.get(key)
        if answer is None or os.getpid() != self._process:
            answer = self._answer(device)
            self._answers[key] = answer
        return answer

    def _current(self) -> int | None:
        try:
            return self.driver().current_device()
        except UnifiedMemoryError:
            return None

    def _answer(self, device: torch.device) -> Availability:
        if device.type not in {"cpu", "cuda"}:
            reason = f"managed memory is for CPU and CUDA devices, not for {device}"
            return Availability(is_available=False, reason=reason, attributes={"device_type": device.type})
        early = self._foreseen(device)
        if early is not None:
            return early
        try:
            driver = self.driver()
            index, count = self.index(device), driver.device_count()
            if index >= count:
                return _no_device(index, count)
            attributes = self.attributes(index)
        except UnifiedMemoryError as error:
            known = error.attributes or {"cuda_error": str(error.details.get("status", "unknown"))}
            facts = {**self._values(device.index if device.type == "cuda" else None), **known}
            reason = error.what if error.rule is None else f"{error.name} must be {error.rule}, got {error.value}"
            return Availability(is_available=False, reason=reason, attributes=facts)
        refusal = _refusal(attributes, device, has_cuda=driver.has_cuda_tensors)
        if refusal is not None:
            return Availability(is_available=False, reason=refusal, attributes=attributes)
        decided = choose(attributes, wanted="managed").decided_by
        reason = f"cuda:{index} has managed memory ({decided}){driver.state and f', {driver.state}'}"
        return Availability(is_available=True, reason=reason, attributes=attributes)

    def _foreseen(self, device: torch.device) -> Availability | None:
        """Return the refusal that the driver's library and torch suffice for, so that CuPy need not be loaded."""
        with self._lock:
            prospect = self._look()
        if not isinstance(prospect, Prospect):
            return None
        index: int | None = device.index if device.type == "cuda" else None  # torch says that it is never None
        asked, count = prospect.of(index), len(prospect.devices)
        if not asked:
            return _no_device(index, count)
        refusals = [_refusal(_hoped(item), device, has_cuda=prospect.has_cuda) for item in asked]
        if refusals[0] is None or None in refusals:
            return None
        return Availability(is_available=False, reason=refusals[0], attributes=asked[0])


def _no_device(index: int | None, count: int) -> Availability:
    reason, facts = f"there is no device cuda:{index}: there are {count}", {"cuda_device_count": count, **UNASKED}
    return Availability(is_available=False, reason=reason, attributes=facts)


def _hoped(attributes: Mapping[str, int | None]) -> dict[str, int]:
    """Return attributes with 1 for the unknown ones, which CUDA's runtime will report."""
    return {name: 1 if value is None else value for name, value in attributes.items()}


def _refusal(attributes: Mapping[str, int], device: torch.device, *, has_cuda: Callable[[], bool]) -> str | None:
    if not attributes["managedMemory"]:
        return "the device has no managed memory (managedMemory=0)"
    if device.type == "cpu" and not attributes["concurrentManagedAccess"]:
        return (
            "the CPU may not touch managed memory while a kernel runs (concurrentManagedAccess=0); "
            "a dual view hands out its side in turns"
        )
    if device.type == "cuda" and not has_cuda():
        return "this torch makes no CUDA tensors (torch.cuda.is_available() is False)"
    return None
