"""``Prospect``: what the driver's own library tells, while CUDA's runtime is not loaded yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_um_managed.driver import Driver, Missing

__all__ = ["Prospect"]


@attrs.frozen
class Prospect:
    """A machine where managed memory may be had, as far as the driver's library knows.

    Args:
        devices: Each device's attributes; None for what the library could not tell.
        facts: What else was looked at.
        load: Loads CUDA's runtime, which takes most of a second, or says what is missing.
        has_cuda: Whether torch can make CUDA tensors here.
    """

    devices: tuple[dict[str, int | None], ...]
    facts: dict[str, Any]
    load: Callable[[], Driver | Missing]
    has_cuda: Callable[[], bool]

    def of(self, index: int | None) -> tuple[dict[str, int | None], ...]:
        """Return the attributes of a device; of all, where nobody knows yet which one is current."""
        return self.devices if index is None else self.devices[index : index + 1]
