"""Sources drawn from a seed: Poisson and regular spikes, spikes at stated times, and input of many Poisson sources.

A source has no state. The spikes of a step are a function of seed, sample and step, so a run in chunks of any length,
or one that resumes, gets the same ones. Random numbers are those of Philox4x64-10, a generator that counts: its key is
the seed and the sample, its counter the step.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["Poisson", "PoissonInput", "Regular", "Source", "SpikeTimes", "uniform_words"]

_LANES = 8
"""Numbers of 32 bits in one block of Philox4x64."""
_AHEAD = 64
_MOST_MEAN = 128
_MOST_TABLES = 64
"""Rates for which the number of spikes is looked up by 16 bits; with more of them it is counted up."""
_UNDECIDED = 255
_IN_CACHE = 1 << 17
"""Numbers that are drawn together."""


def uniform_words(seed: int, stream: int, first: int, steps: int, count: int) -> NDArray[np.uint32]:
    """Return random numbers [steps, count] of 32 bits, each step's by its own counters.

    Args:
        seed: From 0 to below 2⁶⁴.
        stream: Likewise: numbers of other streams are independent.
        first: The first step.
        steps: How many.
        count: Numbers of a step.

    Reference:
        Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011.
    """
    blocks = -(-count // _LANES)
    generator = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=first * blocks)
    raw = np.asarray(generator.random_raw(steps * blocks * (_LANES // 2)), "<u8").view("<u4")
    return raw.reshape(steps, blocks * _LANES)[:, :count].astype(np.uint32, copy=False)


class Source:
    """The base of sources: n neurons whose spikes are a function of the step.

    A subclass has ``_fired(first, steps, sample)``, [steps, n] of ``_dtype``. Iterating gives the steps from the first
    on, each [B, n], without an end.

    Args:
        size: How many neurons.
        dt: Seconds of a step.
        batch: B. Each sample has random numbers of its own; sample b of any batch has the same ones.
        seed: From 0 to below 2⁶⁴.

    Raises:
        ConfigError: A number is not legal.
    """

    def __init__(self, size: int, *, dt: float, batch: int = 1, seed: int = 0) -> None:
        for name, value, least, most in (
            ("size", size, 1, None),
            ("batch", batch, 1, None),
            ("seed", seed, 0, 1 << 64),
        ):
            if not _is_whole(value) or value < least or (most is not None and value >= most):
                rule = f"a whole number from {least}" + ("" if most is None else " to below 2⁶⁴")
                raise ConfigError(self._what, name=name, rule=rule, value=value)
        if isinstance(dt, bool) or not isinstance(dt, (int, float)) or not 0 < dt < math.inf:
            raise ConfigError(self._what, name="dt", rule="above 0 seconds", value=dt)
        self.size, self.dt, self.batch, self.seed = size, float(dt), batch, seed

    @property
    def _what(self) -> str:
        return type(self).__name__

    _dtype: type[np.generic] = np.bool_

    def _fired(self, first: int, steps: int, sample: int) -> NDArray[Any]:
        raise NotImplementedError

    def _numbers(
        self, name: str, value: float | torch.Tensor, rule: str, low: float, high: float
    ) -> NDArray[np.float64]:
        """Return a number, or one for each neuron, as float64 [n]."""
        found = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value, np.float64)
        if isinstance(value, bool) or found.shape not in {(), (self.size,)}:
            rule = f"a number, or a tensor [{self.size}]"
            raise ConfigError(self._what, name=name, rule=rule, value=list(found.shape) or value)
        wrong = ~((found >= low) & (found <= high))
        if wrong.any():
            raise ConfigError(self._what, name=name, rule=rule, value=float(found[wrong][0] if found.ndim else found))
        return np.broadcast_to(found, (self.size,))

    def draw(self, first: int, steps: int) -> torch.Tensor:
        """Return the spikes of some steps, float32 [steps, B, n] of zeros and ones.

        Args:
            first: The first step, 0 or more.
            steps: How many, 0 or more.

        Raises:
            InputError: One of them is not such a number.
        """
        return torch.from_numpy(self._all(first, steps).astype(np.float32))

    def bits(self, first: int, steps: int) -> torch.Tensor:
        """Return the spikes of some steps as bits, int64 [steps, B, ⌈n / 64⌉]: bit i of word w is neuron 64 w + i.

        Args:
            first: As of ``draw``.
            steps: As of ``draw``.

        Raises:
            InputError: As of ``draw``.
        """
        fired = self._all(first, steps)
        words = -(-self.size // 64)
        filled = np.zeros((*fired.shape[:2], words * 64), np.bool_)
        filled[..., : self.size] = fired
        packed = np.packbits(filled, axis=-1, bitorder="little").view("<i8").reshape(steps, self.batch, words)
        return torch.from_numpy(packed.astype(np.int64, copy=False))

    def _check_steps(self, first: int, steps: int) -> None:
        for name, value in (("first", first), ("steps", steps)):
            if not _is_whole(value) or value < 0:
                raise InputError(self._what, name=name, rule="a whole number, 0 or more", value=value)

    def _all(self, first: int, steps: int) -> NDArray[Any]:
        """Return the spikes of some steps, [steps, B, n]."""
        self._check_steps(first, steps)
        if self.batch == 1:
            return self._fired(first, steps, 0)[:, None]
        found = np.empty((steps, self.batch, self.size), self._dtype)
        for sample in range(self.batch):
            found[:, sample] = self._fired(first, steps, sample)
        return found

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the steps from the first on, each float32 [B, n], without an end."""
        for first in range(0, sys.maxsize, _AHEAD):
            yield from self.draw(first, _AHEAD)


class Poisson(Source):
    """Neurons that fire at random: in each step with probability rate · dt, on their own.

    The probability is rounded to a multiple of 2⁻³². A neuron fires once in a step at most.

    Args:
        size: How many neurons.
        rate: Spikes a second: a number, or a tensor [n]; from 0 to 1 / dt.
        dt: Seconds of a step.
        batch: B. Each sample has random numbers of its own; sample b of any batch has the same ones.
        seed: From 0 to below 2⁶⁴.

    Raises:
        ConfigError: A number is not legal.
    """

    def __init__(
        self, size: int, rate: float | torch.Tensor, *, dt: float = 1e-4, batch: int = 1, seed: int = 0
    ) -> None:
        super().__init__(size, dt=dt, batch=batch, seed=seed)
        self.rate = self._numbers("rate", rate, f"from 0 to {1 / dt:g} Hz, which is 1 / dt", 0.0, (1 + 1e-9) / dt)
        self._below = np.minimum(np.rint(self.rate * (self.dt * 2.0**32)), 2.0**32).astype(np.uint64)

    def _fired(self, first: int, steps: int, sample: int) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = uniform_words(self.seed, sample, first, steps, self.size) < self._below
        return found


class PoissonInput(Source):
    """What many Poisson sources give each neuron: the number of their spikes in a step, times a weight.

    It feeds an input without ``spikes=True``, through a ``LayerProjection`` with ``nn.Identity()``. Probabilities are
    rounded to multiples of 2⁻³².

    Args:
        size: How many neurons.
        rate: Spikes a second of all sources of a neuron: a number, or a tensor [n]; from 0 to 128 / dt.
        weight: Of each spike: a number, or a tensor [n].
        dt: Seconds of a step.
        batch: B. Each sample has random numbers of its own; sample b of any batch has the same ones.
        seed: From 0 to below 2⁶⁴.

    Raises:
        ConfigError: A number is not legal.
    """

    _dtype = np.uint8

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        size: int,
        rate: float | torch.Tensor,
        weight: float | torch.Tensor = 1.0,
        *,
        dt: float = 1e-4,
        batch: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(size, dt=dt, batch=batch, seed=seed)
        rule = f"from 0 to {_MOST_MEAN / dt:g} Hz, which is {_MOST_MEAN} / dt"
        self.rate = self._numbers("rate", rate, rule, 0.0, (1 + 1e-9) * _MOST_MEAN / dt)
        most = float(np.finfo(np.float32).max) / _UNDECIDED
        self.weight = self._numbers("weight", weight, "finite, in float32", -most, most).astype(np.float32)
        means, self._group = np.unique(self.rate * self.dt, return_inverse=True)
        self._below = _poisson_bounds(means)
        self._tables: torch.Tensor | None = None
        if len(means) <= _MOST_TABLES:
            top = np.tile(np.arange(1 << 16, dtype=np.uint32) << 16, len(means))
            group = np.arange(len(means)).repeat(1 << 16)
            least, most_spikes = self._count(top, group), self._count(top | np.uint32(0xFFFF), group)
            self._tables = torch.from_numpy(np.where(least == most_spikes, least, np.uint8(_UNDECIDED)))
            self._first = (self._group << 16).astype(np.int32)

    def _count(self, words: NDArray[np.uint32], group: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return how many bounds each of some random numbers reaches, those of its group."""
        found = np.zeros(len(words), np.uint8)
        left = np.arange(len(words))
        for bounds in self._below:
            left = left[words[left] >= bounds[group[left]]]
            if not len(left):
                break
            found[left] += 1
        return found

    def _fired(self, first: int, steps: int, sample: int) -> NDArray[np.uint8]:
        words = uniform_words(self.seed, sample, first, steps, self.size)
        if self._tables is None:
            return self._count(words.reshape(-1), np.tile(self._group, steps)).reshape(words.shape)
        places = (words >> np.uint32(16)).view(np.int32)
        places += self._first
        found: NDArray[np.uint8] = self._tables.index_select(0, torch.from_numpy(places).view(-1)).numpy()
        left = np.flatnonzero(found == _UNDECIDED)
        found[left] = self._count(words[np.divmod(left, self.size)], self._group[left % self.size])
        return found.reshape(words.shape)

    def draw(self, first: int, steps: int) -> torch.Tensor:
        """Return the input of some steps, float32 [steps, B, n]; arguments and errors are those of ``Source.draw``."""
        self._check_steps(first, steps)
        found = torch.empty(steps, self.batch, self.size)
        piece = max(1, _IN_CACHE // (self.batch * self.size))
        for start in range(0, steps, piece):
            part = found[start : start + piece]
            np.multiply(self._all(first + start, len(part)), self.weight, out=part.numpy())
        return found

    def bits(self, first: int, steps: int) -> torch.Tensor:
        """Refuse: several spikes may arrive in a step.

        Raises:
            InputError: Always.
        """
        del first, steps
        hint = "Feed a population without spikes=True; Poisson gives single spikes."
        raise InputError(self._what, name="bits", rule="of a source of single spikes", value="numbers", hint=hint)


def _poisson_bounds(means: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return [K, means] such that random numbers of 32 bits reach as many of them as Poisson sources fire."""
    bounds: list[NDArray[np.uint64]] = []
    chance, total = np.exp(-means), np.zeros_like(means)
    while not bounds or int(bounds[-1].min()) < 1 << 32:
        total = np.minimum(total + chance, 1.0)
        bounds.append(np.rint(total * 2.0**32).astype(np.uint64))
        chance = chance * means / len(bounds)
    return np.stack(bounds)


class Regular(Source):
    """Neurons that fire at equal intervals, each first at a time of its own.

    Args:
        size: How many neurons.
        interval: Seconds between two spikes, dt or more: a number, or a tensor [n].
        start: Seconds of the first spike, 0 or more: a number, or a tensor [n]; None to draw it within one interval.
        dt: Seconds of a step. A spike at time t occurs in step ⌊t / dt⌋.
        batch: B. With ``start=None`` each sample draws for itself.
        seed: From 0 to below 2⁶⁴.

    Raises:
        ConfigError: A number is not legal.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        size: int,
        interval: float | torch.Tensor,
        *,
        start: float | torch.Tensor | None = None,
        dt: float = 1e-4,
        batch: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(size, dt=dt, batch=batch, seed=seed)
        rule, least = f"a finite number of seconds, {dt:g} (dt) or more", self.dt * (1 - 1e-9)
        self.interval = np.maximum(self._numbers("interval", interval, rule, least, sys.float_info.max), self.dt)
        self.start = None
        if start is not None:
            rule = "a finite number of seconds, 0 or more"
            self.start = self._numbers("start", start, rule, 0.0, sys.float_info.max)

    def _fired(self, first: int, steps: int, sample: int) -> NDArray[np.bool_]:
        start = self.start
        if start is None:
            start = uniform_words(self.seed, sample, 0, 1, self.size)[0] * 2.0**-32 * self.interval
        # spikes before the end of each step, by one formula for all chunks; 1e-6 of a step for times that are whole
        ends = (np.arange(first, first + steps + 1)[:, None] - 1e-6) * self.dt
        before = np.maximum(np.ceil((ends - start) / self.interval), 0.0)
        return np.diff(before, axis=0) > 0


class SpikeTimes(Source):
    """Neurons that fire at stated times, as recorded ones.

    Args:
        size: How many neurons.
        times: For each sample, or once for all: seconds [S] of spikes, 0 or more.
        neurons: The neuron [S] of each, likewise. Two spikes of a neuron in one step are one.
        dt: Seconds of a step. A spike at time t occurs in step ⌊t / dt⌋.

    Raises:
        ConfigError: A number is not legal, or times and neurons don't fit.
    """

    def __init__(
        self, size: int, times: Sequence[Any] | torch.Tensor, neurons: Sequence[Any] | torch.Tensor, *, dt: float = 1e-4
    ) -> None:
        is_one = isinstance(times, (torch.Tensor, np.ndarray)) or not times or np.ndim(times[0]) == 0
        samples = [(times, neurons)] if is_one else [*zip(times, neurons, strict=False)]
        if not is_one and len(times) != len(neurons):
            value = f"{len(times)} and {len(neurons)} samples"
            raise ConfigError("SpikeTimes", name="neurons", rule="those of as many samples as times", value=value)
        super().__init__(size, dt=dt, batch=max(1, len(samples)))
        self._events: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for seconds, index in samples:
            when, who = np.asarray(seconds, np.float64).reshape(-1), np.asarray(index).reshape(-1)
            if len(when) != len(who):
                value = f"{len(when)} and {len(who)}"
                raise ConfigError("SpikeTimes", name="neurons", rule="one for each time", value=value)
            if len(who) and (not np.issubdtype(who.dtype, np.integer) or who.min() < 0 or who.max() >= size):
                value = f"{who.dtype}, {who.min()} … {who.max()}"
                raise ConfigError("SpikeTimes", name="neurons", rule=f"whole numbers from 0 to {size - 1}", value=value)
            if not bool(((when >= 0) & (when < math.inf)).all()):
                rule = "finite seconds, 0 or more"
                raise ConfigError("SpikeTimes", name="times", rule=rule, value=float(when[~(when >= 0)][:1].sum()))
            step = np.floor(when / self.dt + 1e-6).astype(np.int64)
            order = np.argsort(step, kind="stable")
            self._events.append((step[order], who[order].astype(np.int64)))

    @property
    def steps(self) -> int:
        """The number of steps up to the last spike."""
        return max(int(step[-1]) + 1 if len(step) else 0 for step, _ in self._events)

    def _fired(self, first: int, steps: int, sample: int) -> NDArray[np.bool_]:
        step, who = self._events[sample]
        low, high = np.searchsorted(step, [first, first + steps])
        found = np.zeros((steps, self.size), np.bool_)
        found[step[low:high] - first, who[low:high]] = True
        return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
