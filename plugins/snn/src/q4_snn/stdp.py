"""Spike-timing-dependent plasticity of 4-bit synapses: local rules for weights that stay on their grid.

A change is smaller than a step between two levels. So each changed weight moves to one of the two levels round its new
value, by chance, so that its mean is that value: there is no master in float, and small changes are not lost. Chances
are counted, not drawn in a row: those of a step depend on the seed and the step alone.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from q4_snn.sources import uniform_words
from q4core import BlockOrder, ConfigError, FormatError, InputError, PackedWeight, ScaleKind, pack_codes

__all__ = ["STDP", "Grid", "STDPRule", "Traces", "dense_changes", "learn", "nibbles_of", "packed_nibbles"]


@attrs.frozen(kw_only=True)
class STDPRule:
    """A rule of plasticity by the times of spikes, with exponential traces: of pairs, or of triplets.

    In each step, a neuron that fires strengthens the synapses whose sources fired before, or in the same step, where
    they may have made it fire; and a source that fires weakens those whose targets fired in a step before. With
    ``a3_plus`` and ``a3_minus``, earlier spikes of the same neuron add to either.

    Args:
        a_plus: By how much a source's spike just before a target's strengthens, 0 or more.
        a_minus: By how much a source's spike just after a target's weakens, 0 or more.
        tau_plus: Seconds in which a source's spike is forgotten.
        tau_minus: Seconds in which a target's spike is forgotten.
        a3_plus: How much more it strengthens for each earlier spike of the target, 0 or more.
        a3_minus: How much more it weakens for each earlier spike of the source, 0 or more.
        tau_x: Seconds in which an earlier spike of a source is forgotten.
        tau_y: Seconds in which an earlier spike of a target is forgotten.
        nearest: Whether only the last spike of a neuron counts, not all.
        dt: Seconds of a step.

    Raises:
        ConfigError: A number is not legal.

    Reference:
        Morrison, Diesmann and Gerstner, Phenomenological models of synaptic plasticity based on spike timing, 2008;
        Pfister and Gerstner, Triplets of spikes in a model of spike timing-dependent plasticity, 2006.
    """

    a_plus: float = 0.01
    a_minus: float = 0.01
    tau_plus: float = 20e-3
    tau_minus: float = 20e-3
    a3_plus: float = 0.0
    a3_minus: float = 0.0
    tau_x: float = 101e-3
    tau_y: float = 125e-3
    nearest: bool = False
    dt: float = 1e-3

    def __attrs_post_init__(self) -> None:
        """Refuse numbers that are not legal."""
        for name in ("a_plus", "a_minus", "a3_plus", "a3_minus", "dt", "tau_plus", "tau_minus", "tau_x", "tau_y"):
            value, least = getattr(self, name), 0.0
            if name == "dt":
                least = 1e-12
            elif name.startswith("tau"):
                least = self.dt
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value >= least):
                raise ConfigError("STDP", name=name, rule=f"a finite number, {least:g} or more", value=value)

    def advance(self, traces: Traces, sources: torch.Tensor, targets: torch.Tensor) -> tuple[Traces, Traces]:
        """Return what a step changes synapses by, and the traces after it.

        The change of the synapse from k to n is the sum over the batch of ``targets[n] · sources[k]`` of the first,
        less ``late_targets[n] · late_sources[k]``.

        Args:
            traces: Before the step.
            sources: [B, K] of zeros and ones: what fired.
            targets: [B, N], likewise.
        """
        decays = (math.exp(-self.dt / tau) for tau in (self.tau_plus, self.tau_x, self.tau_minus, self.tau_y))
        before, earlier_in, after, earlier_out = (
            decay * trace for decay, trace in zip(decays, attrs.astuple(traces, recurse=False), strict=True)
        )
        strengthening = targets * (self.a_plus + self.a3_plus * earlier_out)
        weakening = sources * (self.a_minus + self.a3_minus * earlier_in)
        now = self._more(before, sources)
        change = Traces(now, weakening, after, strengthening)
        more = self._more(earlier_in, sources), self._more(after, targets), self._more(earlier_out, targets)
        return change, Traces(now, *more)

    def _more(self, trace: torch.Tensor, spikes: torch.Tensor) -> torch.Tensor:
        return torch.maximum(trace, spikes) if self.nearest else trace + spikes


@attrs.frozen(eq=False)
class Traces:
    """Traces of spikes: of sources [B, K] and of targets [B, N], each of the last ones and of earlier ones."""

    sources: torch.Tensor
    late_sources: torch.Tensor
    late_targets: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def none(cls, sources: torch.Tensor, targets: torch.Tensor) -> Traces:
        """Return traces of no spikes, of the shapes of these."""
        return cls(*(torch.zeros_like(item) for item in (sources, sources, targets, targets)))


class Grid:
    """The 16 levels that weights may have: ``offset + scale · level`` with a scale and an offset of each block.

    Args:
        levels: float32 [16], ascending.
        scale: float32 [blocks].
        offset: float32 [blocks].
        block: Synapses of a block, and of a row; rows begin with a block of their own where the row is not 0.
    """

    def __init__(self, levels: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, block: tuple[int, int]) -> None:
        self._levels, self._scale, self._offset = levels, scale, offset
        self._block, self._row = block

    def _blocks(self, index: torch.Tensor) -> torch.Tensor:
        if not self._row:
            return index // self._block
        return index // self._row * -(-self._row // self._block) + index % self._row // self._block

    def values(self, index: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """Return the weights of synapses by their levels, float32."""
        block = self._blocks(index)
        return self._offset[block] + self._scale[block] * self._levels[ranks.long()]

    def moved(
        self, index: torch.Tensor, ranks: torch.Tensor, change: torch.Tensor, chance: torch.Tensor
    ) -> torch.Tensor:
        """Return the levels after a change, each one of the two round the new value, so that the mean is right.

        Args:
            index: int64 [S], of synapses.
            ranks: uint8 [S], of their levels.
            change: float32 [S], of their weights.
            chance: float32 [S], from 0 to below 1.
        """
        scale = self._scale[self._blocks(index)]
        wanted = self._levels[ranks.long()] + change / torch.where(scale != 0, scale, torch.inf)
        wanted = wanted.clamp(self._levels[0], self._levels[-1])
        high = torch.searchsorted(self._levels, wanted).clamp(1, len(self._levels) - 1)
        below, above = self._levels[high - 1], self._levels[high]
        share = (wanted - below) / (above - below)
        return (high - 1 + (chance < share).long()).to(torch.uint8)


def nibbles_of(packed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the codes, uint8 of 4 bits, of some synapses, of which two lie in each byte."""
    return packed[index >> 1] >> ((index & 1) * 4).to(torch.uint8) & 15


def packed_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [S] as bytes, two in each, the first in the low bits."""
    pairs = torch.nn.functional.pad(codes.reshape(-1), (0, codes.numel() & 1)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def learn(grid: Grid, packed: torch.Tensor, changes: tuple[torch.Tensor, torch.Tensor], seed: int, step: int) -> int:
    """Change the codes of some synapses, in place; return how many have another one now.

    Args:
        grid: Their levels.
        packed: uint8, two codes in a byte.
        changes: int64 [S] of synapses, each once, and float32 [S] by which their weights change.
        seed: Of the chances.
        step: Of the chances.
    """
    index, change = changes
    if not len(index):
        return 0
    words = uniform_words(seed, 1 << 63, step, 1, len(index))[0]
    chance = torch.from_numpy((words >> 8).astype("float32")) * 2.0**-24
    old = nibbles_of(packed, index)
    new = grid.moved(index, old, change, chance.to(change.device))
    move = (new - old) << ((index & 1) * 4).to(torch.uint8)  # modulo 256, so that neighbours in a byte don't meet
    packed.index_put_((index >> 1,), move, accumulate=True)
    return int((new != old).sum())


class STDP:
    """A 4-bit weight that learns by the times of spikes, by itself; ``PlasticProjection`` does in a network.

    Args:
        weight: [N, K] of a format with a code book and plain block scales, such as NF4 or FP4; of any K that the
            format takes. It is not changed.
        seed: Of the rounding.
        **rule: As of ``STDPRule``.

    Raises:
        ConfigError: A number is not legal.
        FormatError: The weight's format has no such grid.
    """

    def __init__(self, weight: PackedWeight, *, seed: int = 0, **rule: Any) -> None:
        self.rule = STDPRule(**rule)
        levels = weight.format.codebook if weight.codebook is None else weight.codebook.tolist()
        if not levels or weight.scale_kind is not ScaleKind.PLAIN or weight.offset is not None:
            expected = "of a format with a code book, with plain scales and without offsets, such as nf4"
            found = f"{weight.format.name}, {weight.scale_kind.value}{', with offsets' * (weight.offset is not None)}"
            raise FormatError("STDP", name="weight", rule=expected, value=found)
        self._weight, self._seed = weight, seed
        ordered, self._order = torch.tensor(levels, dtype=torch.float32, device=weight.device).sort()
        is_flat = weight.blocks is BlockOrder.FLAT  # its blocks run across rows
        scale = weight.scale.float().reshape(-1)
        block = weight.block_size, 0 if is_flat else weight.in_features
        self.grid = Grid(ordered, scale, torch.zeros_like(scale), block)
        self.packed = packed_nibbles(self._order.argsort().to(torch.uint8)[weight.codes().long()])
        self._traces: Traces | None = None
        self._steps = 0

    @property
    def weight(self) -> PackedWeight:
        """The weight as it is now: packed codes of its own, the scales of the first."""
        return self.weight_of(self.packed)

    def weight_of(self, packed: torch.Tensor) -> PackedWeight:
        """Return the weight whose levels are these, two ranks in a byte, uint8 [⌈N · K / 2⌉]."""
        index = torch.arange(math.prod(self._weight.shape), device=packed.device)
        codes = self._order.to(torch.uint8)[nibbles_of(packed, index).long()]
        if self._weight.blocks is not BlockOrder.FLAT:
            codes = codes.view(self._weight.shape)
        return attrs.evolve(self._weight, qdata=pack_codes(codes, self._weight.packing))

    def numbers(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that decide what it is."""
        return (self.packed, self._order, self._weight.scale)

    @torch.no_grad()
    def step(self, sources: torch.Tensor, targets: torch.Tensor) -> int:
        """Learn from what fired in one step; to be called by one thread at a time.

        Args:
            sources: [B, K] of zeros and ones, of any dtype; changes of a batch add up.
            targets: [B, N], likewise.

        Returns:
            How many synapses have another code now.

        Raises:
            InputError: Sizes don't fit the weight, or the batch is not that of the steps before, or what is given is
                other than 0 and 1. Nothing is learnt.
        """
        rows, columns = self._weight.shape
        for name, spikes, size in (("sources", sources, columns), ("targets", targets, rows)):
            if spikes.dim() != 2 or spikes.shape[1] != size or len(spikes) != len(sources):  # noqa: PLR2004  # [B, n]
                raise InputError("STDP", name=name, rule=f"of shape [B, {size}]", value=list(spikes.shape))
            if bool((wrong := (spikes != 0) & (spikes != 1)).any()):
                raise InputError("STDP", name=name, rule="0 and 1 alone", value=spikes[wrong][0].item())
        if self._traces is not None and len(self._traces.sources) != len(sources):
            rule = f"a batch of {len(self._traces.sources)}, as in the steps before"
            raise InputError("STDP", name="sources", rule=rule, value=list(sources.shape))
        like = torch.empty(0, dtype=torch.float32, device=self.packed.device)
        sources, targets = sources.to(like), targets.to(like)
        change, self._traces = self.rule.advance(self._traces or Traces.none(sources, targets), sources, targets)
        self._steps += 1
        return learn(self.grid, self.packed, dense_changes(change), self._seed, self._steps - 1)


def dense_changes(change: Traces) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of K · N synapses change and by how much, int64 [S] and float32 [S]: those of what fires alone.

    Args:
        change: As ``STDPRule.advance`` returns it.
    """
    fired_out, fired_in = change.targets.any(0), change.late_sources.any(0)
    rows, others = fired_out.nonzero()[:, 0], (~fired_out).nonzero()[:, 0]
    columns = fired_in.nonzero()[:, 0]
    late = change.late_sources[:, columns]
    whole = change.targets[:, rows].T @ change.sources  # [rows, K]
    whole[:, columns] -= change.late_targets[:, rows].T @ late
    part = -(change.late_targets[:, others].T @ late)  # [others, columns]
    width = change.sources.shape[1]
    index = torch.cat([
        (rows[:, None] * width + torch.arange(width, device=rows.device)).reshape(-1),
        (others[:, None] * width + columns).reshape(-1),
    ])  # fmt: skip
    amount = torch.cat([whole.reshape(-1), part.reshape(-1)])
    changed = amount != 0
    return index[changed], amount[changed]
