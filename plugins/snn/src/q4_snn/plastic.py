"""Projections that learn while a network runs: STDP of dense and of sparse synapses, as a part of the network's state.

What a projection has learnt is in ``NetworkState.coming``, with its traces: the projection itself never changes. So a
state goes on where it ended, a call that fails has learnt nothing, and an actor that restarts learns the same again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_snn.population import Population, check_name
from q4_snn.stdp import STDP, Grid, STDPRule, Traces, dense_changes, learn, nibbles_of, packed_nibbles
from q4core import ConfigError, InputError, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PlasticProjection", "PlasticSparseProjection"]

_MOST_DELAY = 255
_LEVELS = 16


class _Plastic(nn.Module):
    """The base of projections that learn: names, sizes, and how the state lies in one float32 vector."""

    sees_target = True
    """A call gets what the target gave a step ago, as ``fired``."""
    delay: int

    def __init__(self, source: Population, target: Population, rule: STDPRule, seed: int, name: str | None) -> None:
        super().__init__()
        self.source, self.target = source.name, target.name
        self.source_size, self.target_size = source.size, target.size
        self.name = f"{source.name}->{target.name}" if name is None else name
        check_name("projection", self.name, ".")
        self.rule, self.seed = rule, seed
        for what, population in (("source", source), ("target", target)):
            if not population.is_binary:
                expected = "a population of spikes: of neurons that fire, or an input with spikes=True"
                raise ConfigError(f"projection {self.name!r}", name=what, rule=expected, value=population.name)

    def _shapes(self, batch: int) -> list[tuple[int, ...]]:
        """Return the shapes of the state's parts before the traces; the codes' in bytes comes first."""
        raise NotImplementedError

    def _codes(self) -> torch.Tensor:
        """Return the codes to begin with, uint8."""
        raise NotImplementedError

    def coming(self, batch: int) -> torch.Tensor:
        """Return the state to begin with, float32 [S]: the codes' bytes, what is on its way, and traces."""
        codes = self._codes()
        bytes_ = nn.functional.pad(codes, (0, -len(codes) % 4)).view(torch.float32)
        rest = sum(math.prod(shape) for shape in self._all_shapes(batch)[1:])
        return torch.cat([bytes_, bytes_.new_zeros(rest)])

    def _all_shapes(self, batch: int) -> list[tuple[int, ...]]:
        sides = (batch, self.source_size), (batch, self.target_size)
        return [*self._shapes(batch), sides[0], sides[0], sides[1], sides[1]]

    def _parts(self, coming: torch.Tensor, batch: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the codes' bytes, and the other parts, all of them views."""
        shapes = self._all_shapes(batch)
        sizes = [-(-len(self._codes()) // 4), *map(math.prod, shapes[1:])]
        if coming.shape != (sum(sizes),) or coming.dtype is not torch.float32:
            rule = f"float32 [{sum(sizes)}] for a batch of {batch}"
            raise InputError(f"projection {self.name!r}", name="state", rule=rule, value=[*coming.shape])
        first, *others = coming.split(sizes)
        return first.view(torch.uint8), [part.view(shape) for part, shape in zip(others, shapes[1:], strict=True)]

    def _checked(self, spikes: torch.Tensor, fired: torch.Tensor | None) -> torch.Tensor:
        batch, wanted = len(spikes), [len(spikes), self.source_size]
        if [*spikes.shape] != wanted or (spikes.requires_grad and torch.is_grad_enabled()):
            rule = f"of shape {wanted} and without gradients; torch.no_grad() runs them"
            value = f"{[*spikes.shape]}{', with gradients' * spikes.requires_grad}"
            raise InputError(f"projection {self.name!r}", name="spikes", rule=rule, value=value)
        return spikes.new_zeros(batch, self.target_size) if fired is None else fired

    def _learn(self, parts: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> Traces:
        """Advance the traces, in place; return what the step changes synapses by."""
        held = parts[-4:]
        change, after = self.rule.advance(Traces(*held), sources, targets)
        for old, new in zip(held, attrs.astuple(after, recurse=False), strict=True):
            old.copy_(new)
        return change


class PlasticProjection(_Plastic):
    """Dense synapses of four bits that learn by the times of spikes while a network runs.

    The spikes of a step arrive by the weights that all steps before have made. A source counts as firing when its
    spike arrives, ``delay`` steps after it fired.

    Args:
        source: Whose spikes it takes.
        target: Whose input it gives, and whose spikes it learns from.
        weight: [target size, source size], to begin with; as of ``STDP``.
        rule: How it learns.
        delay: Steps that a spike takes; a cycle needs at least one step.
        seed: Of the rounding.
        name: Defaults to ``source->target``.

    Raises:
        ConfigError: A population does not fire, or the delay is not legal.
        FormatError: The weight's format has no grid that ``STDP`` takes.
        InputError: The weight has another shape.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        source: Population,
        target: Population,
        weight: PackedWeight,
        rule: STDPRule,
        *,
        delay: int = 0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(source, target, rule, seed, name)
        what = f"projection {self.name!r}"
        if not isinstance(delay, int) or isinstance(delay, bool) or delay < 0:
            raise ConfigError(what, name="delay", rule="steps, 0 or more", value=delay)
        if tuple(weight.shape) != (target.size, source.size):
            rule_ = f"of shape {[target.size, source.size]}"
            raise InputError(what, name="weight", rule=rule_, value=[*weight.shape])
        self.delay = delay
        self.initial = STDP(weight, seed=seed)
        """What it begins with."""

    def _codes(self) -> torch.Tensor:
        return self.initial.packed

    def _shapes(self, batch: int) -> list[tuple[int, ...]]:
        return [(0,), (1,), (batch, self.source_size)]  # codes, whether there was a step, and what arrived in it

    def forward(
        self, spikes: torch.Tensor, coming: torch.Tensor, step: int, fired: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Learn from the step before, and return the input of the target [B, n].

        Args:
            spikes: [B, m] that arrive.
            coming: As ``coming`` returned it and steps before this one left it; written.
            step: The number of this step.
            fired: [B, n], what the target gave a step ago; None before the first.

        Raises:
            InputError: Spikes or state are of another size, or gradients are to reach them.
        """
        fired = self._checked(spikes, fired)
        codes, parts = self._parts(coming, len(spikes))
        began, arrived = parts[0], parts[1]
        grid, width = self.initial.grid, self.source_size
        if bool(began):
            learn(grid, codes, dense_changes(self._learn(parts, arrived, fired)), self.seed, step - 1)
        began.fill_(1)
        arrived.copy_(spikes)
        sample, source = spikes.nonzero(as_tuple=True)
        index = torch.arange(self.target_size, device=spikes.device) * width + source[:, None]
        current = spikes.new_zeros(len(spikes), self.target_size)
        return current.index_add_(0, sample, grid.values(index, nibbles_of(codes, index)).to(spikes.dtype))

    def weight_in(self, coming: torch.Tensor | None = None) -> PackedWeight:
        """Return the weight as a state has it, ``NetworkState.coming[name]``; None for what it begins with."""
        codes = self._codes() if coming is None else coming.view(torch.uint8)[: len(self._codes())]
        return self.initial.weight_of(codes)

    def numbers(self) -> tuple[Any, ...]:
        """Return what decides what it gives."""
        return (repr(self.rule), self.seed, *self.initial.numbers())


class PlasticSparseProjection(_Plastic):
    """Sparse synapses of four bits that learn by the times of spikes while a network runs.

    Weights are one of 16 levels between two bounds. Pairs are made by when source and target fire; the delay of a
    synapse has no part in it. The spikes of a step are sent by the weights that all steps before have made.

    A synapse takes 2 or 4 bytes for its target, half a byte for its weight, 1 for its delay and 4 for the order by
    targets.

    Args:
        source: int64 [S], the index of each synapse's source.
        target: int64 [S], the index of its target; several synapses may join the same two.
        weight: float32 [S], or one number for all, between the bounds: the next level is taken.
        delay: int64 [S], in steps, from 1 to 255; or one number for all.
        sources: The source population.
        targets: The target population.
        rule: How it learns.
        bounds: The least and the greatest weight.
        seed: Of the rounding.
        name: Defaults to ``source->target``.

    Raises:
        ConfigError: A population does not fire, or the bounds are not legal.
        InputError: A tensor has the wrong shape, dtype or a value out of range, or there is no synapse.
    """

    delay = 1
    starts: torch.Tensor
    index: torch.Tensor
    steps: torch.Tensor
    ends: torch.Tensor
    into: torch.Tensor
    origin: torch.Tensor
    codes: torch.Tensor

    def __init__(  # noqa: PLR0913  # one argument per fact of a synapse, and options
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | float,
        delay: torch.Tensor | int,
        *,
        sources: Population,
        targets: Population,
        rule: STDPRule,
        bounds: Sequence[float],
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(sources, targets, rule, seed, name)
        what = f"projection {self.name!r}"
        low, high = self.bounds = (float(bounds[0]), float(bounds[1]))
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(what, name="bounds", rule="two finite numbers, the lower first", value=(low, high))
        size = (len(source),)
        strength = weight if isinstance(weight, torch.Tensor) else torch.full(size, float(weight))
        wait = delay if isinstance(delay, torch.Tensor) else torch.full(size, delay, dtype=torch.int64)
        for which, values, dtype, least, most in (
            ("source", source, torch.int64, 0, self.source_size - 1),
            ("target", target, torch.int64, 0, self.target_size - 1),
            ("delay", wait, torch.int64, 1, _MOST_DELAY),
            ("weight", strength, torch.float32, low, high),
        ):
            if values.dtype is not dtype or values.shape != size or not len(values):
                expected = f"{dtype} {[*size]}, of 1 or more"
                raise InputError(what, name=which, rule=expected, value=f"{values.dtype} {[*values.shape]}")
            if not bool(((values >= least) & (values <= most)).all()):
                value = [values.min().item(), values.max().item()]
                raise InputError(what, name=which, rule=f"in {least:g} … {most:g}", value=value)
        order = (source * self.target_size + target).argsort(stable=True)
        by_target = target[order].argsort(stable=True)
        for which, member, count in (("starts", source, self.source_size), ("ends", target, self.target_size)):
            places = torch.zeros(count + 1, dtype=torch.int64)
            torch.cumsum(torch.bincount(member, minlength=count), 0, out=places[1:])
            self.register_buffer(which, places)
        self.register_buffer("index", target[order].to(torch.int32))
        self.register_buffer("steps", wait[order].to(torch.uint8))
        self.register_buffer("into", by_target.to(torch.int32))
        self.register_buffer("origin", source[order].to(torch.int32))
        level = (strength[order].double() - low) / (high - low) * (_LEVELS - 1)
        self.register_buffer("codes", packed_nibbles(level.round().to(torch.uint8)))
        self.rows = int(wait.max()) + 1

    @property
    def synapses(self) -> int:
        """The number of synapses."""
        return len(self.index)

    def _grid(self) -> Grid:
        low, high = self.bounds
        levels = torch.arange(_LEVELS, dtype=torch.float32, device=self.codes.device)
        scale = levels.new_full((1,), (high - low) / (_LEVELS - 1))
        return Grid(levels, scale, levels.new_full((1,), low), (self.synapses, 0))

    def _codes(self) -> torch.Tensor:
        return self.codes

    def _shapes(self, batch: int) -> list[tuple[int, ...]]:
        return [(0,), (self.rows, batch, self.target_size)]

    def forward(
        self, spikes: torch.Tensor, coming: torch.Tensor, step: int, fired: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send the spikes of the step before, learn from it, and return what arrives in this one [B, n].

        Args:
            spikes: [B, m], what the sources gave a step ago.
            coming: As ``coming`` returned it and steps before this one left it; written.
            step: The number of this step.
            fired: [B, n], what the target gave a step ago; None before the first.

        Raises:
            InputError: Spikes or state are of another size, or gradients are to reach them.
        """
        fired = self._checked(spikes, fired)
        codes, parts = self._parts(coming, len(spikes))
        ring, grid = parts[0], self._grid()
        sample, source = spikes.nonzero(as_tuple=True)
        index, counts = _stretches(self.starts, source)
        place = (self.steps[index].long() + step - 1) % len(ring) * ring[0].numel() + self.index[index].long()
        place += (sample * self.target_size).repeat_interleave(counts)
        ring.view(-1).index_add_(0, place, grid.values(index, nibbles_of(codes, index)))
        if step > 0:
            learn(grid, codes, self._changes(self._learn(parts, spikes, fired)), self.seed, step - 1)
        arrived = ring[step % len(ring)].clone()
        ring[step % len(ring)] = 0
        return arrived.to(spikes.dtype)

    def _changes(self, change: Traces) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which synapses change and by how much: those of what fires alone."""
        outgoing, _ = _stretches(self.starts, change.late_sources.any(0).nonzero()[:, 0])
        incoming, _ = _stretches(self.ends, change.targets.any(0).nonzero()[:, 0])
        at = torch.cat([outgoing, self.into[incoming].long()]).unique()
        source, target = self.origin[at].long(), self.index[at].long()
        amount = (change.targets[:, target] * change.sources[:, source]).sum(0)
        amount -= (change.late_targets[:, target] * change.late_sources[:, source]).sum(0)
        changed = amount != 0
        return at[changed], amount[changed]

    def weights_in(self, coming: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weights float32 [S], by source and then by target, as a state has them, or to begin with."""
        codes = self.codes if coming is None else coming.view(torch.uint8)
        every = torch.arange(self.synapses, device=codes.device)
        return self._grid().values(every, nibbles_of(codes, every))

    def numbers(self) -> tuple[Any, ...]:
        """Return what decides what it gives."""
        return (repr(self.rule), self.seed, self.bounds, *self.state_dict().values())


def _stretches(starts: torch.Tensor, members: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of all synapses of some members, one stretch after the other, and how many each has."""
    first = starts[members]
    counts = starts[members + 1] - first
    ends = counts.cumsum(0)
    index = torch.arange(int(ends[-1]) if len(ends) else 0, device=starts.device)
    return index + torch.repeat_interleave(first - ends + counts, counts), counts
