"""Pictures of what a network does: rasters, rates and membranes, by matplotlib, which is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4core import InputError, PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["membrane", "raster", "rates"]

_STEPS = (2, 3)


def raster(spikes: torch.Tensor, *, dt: float = 1e-3, sample: int = 0, ax: Any = None) -> Any:
    """Draw a point for each spike: time in seconds, and the neuron.

    Args:
        spikes: [T, n] or [T, B, n] of zeros and ones; or int64 [S, 3] of a ``Recorder`` with ``events``.
        dt: Seconds of a step.
        sample: Which of a batch.
        ax: matplotlib's axes; None for a new figure.

    Returns:
        The axes.

    Raises:
        InputError: Spikes are of another shape, or there is no such sample.
        PluginError: matplotlib is not installed.
    """
    ax = _axes(ax)
    if spikes.dtype is torch.int64 and spikes.dim() == 2 and spikes.shape[1] == 3:  # noqa: PLR2004  # events
        step, neuron = spikes[spikes[:, 1] == sample][:, [0, 2]].unbind(1)
    else:
        step, neuron = _of_sample("raster", spikes, sample).nonzero(as_tuple=True)
    ax.scatter(step.cpu() * dt, neuron.cpu(), s=4, marker="|", linewidths=0.8, color="black")
    ax.set(xlabel="time (s)", ylabel="neuron")
    return ax


def rates(spikes: torch.Tensor, *, dt: float = 1e-3, window: float = 20e-3, sample: int = 0, ax: Any = None) -> Any:
    """Draw the mean rate of all neurons over time, in spikes a second.

    Args:
        spikes: [T, n] or [T, B, n] of zeros and ones.
        dt: Seconds of a step.
        window: Seconds over which a point is the mean.
        sample: Which of a batch.
        ax: As of ``raster``.

    Returns:
        The axes.

    Raises:
        InputError: Spikes are of another shape, there is no such sample, or the window is longer than the run.
        PluginError: matplotlib is not installed.
    """
    found = _of_sample("rates", spikes, sample).float().mean(1)
    width = max(1, round(window / dt))
    if width > len(found):
        raise InputError("rates", name="window", rule=f"at most {len(found) * dt:g} s, the run", value=window)
    means = found.unfold(0, width, 1).mean(1) / dt
    ax = _axes(ax)
    ax.plot((torch.arange(len(means)) + width / 2) * dt, means.cpu(), color="black", linewidth=1)
    ax.set(xlabel="time (s)", ylabel="rate (Hz)", ylim=(0, None))
    return ax


def membrane(  # noqa: PLR0913  # one argument per option
    values: torch.Tensor,
    *,
    neurons: Sequence[int] = (0,),
    threshold: float | None = None,
    dt: float = 1e-3,
    sample: int = 0,
    ax: Any = None,
) -> Any:
    """Draw the membranes of some neurons over time.

    Args:
        values: [T, n] or [T, B, n], as ``record=("name.mem",)`` returns them.
        neurons: Which.
        threshold: Where neurons fire, drawn as a line; None for none.
        dt: Seconds of a step.
        sample: Which of a batch.
        ax: As of ``raster``.

    Returns:
        The axes.

    Raises:
        InputError: Values are of another shape, or there is no such sample or neuron.
        PluginError: matplotlib is not installed.
    """
    found = _of_sample("membrane", values, sample)
    if not neurons or not all(0 <= index < found.shape[1] for index in neurons):
        raise InputError("membrane", name="neurons", rule=f"some of 0 … {found.shape[1] - 1}", value=[*neurons])
    ax = _axes(ax)
    for index in neurons:
        ax.plot(torch.arange(len(found)) * dt, found[:, index].cpu(), linewidth=1, label=f"neuron {index}")
    if threshold is not None:
        ax.axhline(threshold, color="grey", linestyle="--", linewidth=1, label="threshold")
    ax.set(xlabel="time (s)", ylabel="membrane")
    ax.legend(loc="upper right", fontsize="small")
    return ax


def _of_sample(what: str, values: torch.Tensor, sample: int) -> torch.Tensor:
    """Return a sample's values [T, n]."""
    if values.dim() not in _STEPS or not len(values):
        raise InputError(what, name="values", rule="of shape [T, n] or [T, B, n]", value=[*values.shape])
    whole = values.detach()[:, None] if values.dim() == min(_STEPS) else values.detach()
    if not 0 <= sample < whole.shape[1]:
        raise InputError(what, name="sample", rule=f"one of 0 … {whole.shape[1] - 1}", value=sample)
    return whole[:, sample]


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot as plt  # noqa: PLC0415  # an extra
    except ImportError as error:
        hint = 'pip install "q4-snn[plot]"'
        raise PluginError(
            "pictures", name="package matplotlib", rule="installed", value=str(error), hint=hint
        ) from error
    return plt.subplots(layout="constrained")[1]
