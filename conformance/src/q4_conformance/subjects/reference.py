"""Requirements of every run: the reference backend, to fall back on and to be chosen against, and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_conformance.outcome import NotTestableError
from q4core import Q4Error, default_registry

if TYPE_CHECKING:
    from q4core import Backend

REFERENCE = "dequant-fallback"


class NotFoundError(Q4Error, LookupError):
    """What is looked for by name is not there."""

    def __str__(self) -> str:
        """Return the message, which ``LookupError`` would otherwise quote."""
        return str(self.args[0])


class MissingReferenceError(NotFoundError, code="missing_reference"):
    """The reference backend is not there, or does not load, so that no subject can be compared with it."""


def reference_backend() -> Backend:
    """Return the reference backend that is installed.

    Raises:
        MissingReferenceError: It is not, or it does not load.
    """
    registry = default_registry()
    found = registry.backends().get(REFERENCE)
    if found is None:
        reasons = [item.reason.message for item in registry.invalid_backends() if item.name == REFERENCE]
        raise MissingReferenceError(
            "q4 conform",
            name=f"backend {REFERENCE!r}",
            rule="installed, because the kit compares with it",
            value="; ".join(reasons) or "no such backend",
            hint=f"Install q4-{REFERENCE}, and disable it by no Q4_* variable; `q4 doctor` says what became of it.",
        )
    return found


def require_device(device: torch.device) -> None:
    """Raise ``NotTestableError`` where torch sees no such device: what is declared for it can't be judged here."""
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise NotTestableError(f"{device} is not here: torch sees {count} CUDA devices")
        return
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise NotTestableError(f"{device} is not here: {error}") from error
