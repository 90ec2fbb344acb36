"""Spike generators: spikes over time from numbers, time first; as snnTorch's ``spikegen`` defines them."""

from __future__ import annotations

import torch

from q4core import InputError

__all__ = ["delta", "latency", "rate"]


def _check(what: str, x: torch.Tensor, steps: int) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise InputError(what, name="steps", rule="a positive whole number", value=steps)
    if not x.is_floating_point() or not bool(((x >= 0) & (x <= 1)).all()):
        value = f"{x.dtype} from {x.min():g} to {x.max():g}" if x.numel() else str(x.dtype)
        raise InputError(what, name="x", rule="floats from 0 to 1", value=value)


def rate(x: torch.Tensor, steps: int, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return spikes that occur in each step with probability x.

    Args:
        x: [...], floats from 0 to 1.
        steps: T.
        generator: Defaults to torch's own.

    Returns:
        [T, ...] of zeros and ones, of x's dtype.

    Raises:
        InputError: x or steps is not legal.
    """
    _check("rate", x, steps)
    return torch.bernoulli(x.expand(steps, *x.shape), generator=generator)


def latency(
    x: torch.Tensor, steps: int, *, threshold: float = 0.01, tau: float | None = None, linear: bool = False
) -> torch.Tensor:
    """Return one spike for each number: the greater, the earlier; none for numbers below the threshold.

    Args:
        x: [...], floats from 0 to 1.
        steps: T.
        threshold: From 0 to below 1.
        tau: Steps of the time constant; None to spread the spikes from the first step to the last.
        linear: Whether the time is tau · (1 - x), not tau · ln(x / (x - threshold)), which is when a membrane that
            x charges reaches the threshold.

    Returns:
        [T, ...] of zeros and ones, of x's dtype. What would come after the last step does not come.

    Raises:
        InputError: An argument is not legal.
    """
    _check("latency", x, steps)
    if not 0 <= threshold < 1:
        raise InputError("latency", name="threshold", rule="from 0 to below 1", value=threshold)
    if tau is not None and not tau > 0:
        raise InputError("latency", name="tau", rule="above 0 steps", value=tau)
    if linear:
        times = (1 - x) * (steps - 1 if tau is None else tau)
    else:
        charged = x.clamp_min(threshold + 1e-7)
        times = torch.log(charged / (charged - threshold)) * (1 if tau is None else tau)
        if tau is None:
            times = times * ((steps - 1) / times.max()) if times.numel() and times.max() > 0 else times
    return (torch.arange(steps, device=x.device).view(-1, *[1] * x.dim()) == times.round()).to(x) * (x >= threshold)


def delta(x: torch.Tensor, *, threshold: float = 0.1, off_spike: bool = False) -> torch.Tensor:
    """Return a spike wherever x has risen by a threshold since the step before, beginning from 0.

    Args:
        x: [T, ...], finite floats.
        threshold: Least change that counts, above 0.
        off_spike: Whether as great a fall gives -1.

    Returns:
        [T, ...] of zeros and ones, and of minus ones for falls.

    Raises:
        InputError: x has no time or is not finite, or the threshold is not legal.
    """
    if x.dim() == 0 or not x.is_floating_point() or not bool(x.isfinite().all()):
        value = f"{x.dtype} {list(x.shape)}{', with NaN or infinity' * (not bool(x.isfinite().all()))}"
        raise InputError("delta", name="x", rule="finite floats [T, ...]", value=value)
    if not threshold > 0:
        raise InputError("delta", name="threshold", rule="above 0", value=threshold)
    change = torch.diff(x, dim=0, prepend=torch.zeros_like(x[:1]))
    spikes = (change >= threshold).to(x)
    return spikes - (change <= -threshold).to(x) if off_spike else spikes
