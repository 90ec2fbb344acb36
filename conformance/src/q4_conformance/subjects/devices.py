"""Whether the device that a target is judged on is here at all."""

from __future__ import annotations

import torch

from q4_conformance.outcome import NotTestableError


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
