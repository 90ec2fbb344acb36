"""``SparseProjection``: the synapses that exist, each with a weight of four bits and a delay of its own.

Synapses are sorted by source, so that a spike reads those of its source alone. A synapse takes 2 bytes for its target
(4 where there are more than 65,536), half a byte for its weight's code, 1 for its delay, and an eighth for scale and
offset, which 32 synapses share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import q4core as q4
from q4_snn.connectors import fixed_total_number
from q4_snn.population import Population, check_name

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SparseProjection"]

_BLOCK = 32
_SHORT = 1 << 16
_MOST_DELAY = 255


class SparseProjection(nn.Module):
    """Synapses between two populations, delivered by events to a ring of the input of coming steps.

    Given the populations, it is a projection of a ``Network``, which has a ring for each sample in its state. Given
    their sizes, it is used by itself: ``deliver`` and ``advance`` have a ring here, for one thread. It does not train.

    Weights become codes of Q4_1 (16 levels between the least and the largest of each 32 synapses of neighbouring
    sources), so that their mean and their spread stay what they were to a small part of a level.

    Args:
        source: int64 [S], the index of each synapse's source.
        target: int64 [S], the index of its target; several synapses may join the same two.
        weight: float32 [S], or one number for all.
        delay: int64 [S], in steps, from 1 to 255; or one number for all.
        sources: The source population, or how many sources there are.
        targets: The target population, or how many targets there are.
        name: Defaults to ``source->target``, as of ``Projection``.

    Raises:
        ConfigError: The source is a population of other numbers than spikes, or a size or the name is not legal.
        InputError: A tensor has the wrong shape, dtype or a value out of range, or there is no synapse.
    """

    delay = 1
    """The least steps that a spike takes: what a network needs to know of the order of populations."""

    starts: torch.Tensor
    index: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    steps: torch.Tensor
    ring: torch.Tensor

    def __init__(  # noqa: PLR0913  # one argument per fact of a synapse, and two sizes
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | float,
        delay: torch.Tensor | int,
        *,
        sources: int | Population,
        targets: int | Population,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.source, self.source_size = _end(sources, "source")
        self.target, self.target_size = _end(targets, "target")
        self.name = f"{self.source}->{self.target}" if name is None else name
        check_name("projection", self.name, ".")
        if isinstance(sources, Population) and not sources.is_binary:
            rule = "a population of spikes: of neurons that fire, or an input with spikes=True"
            raise q4.ConfigError(f"projection {self.name!r}", name="sources", rule=rule, value=sources.name)
        if not isinstance(weight, torch.Tensor):
            weight = torch.full((len(source),), float(weight), dtype=torch.float32)
        if isinstance(delay, int):
            delay = torch.full((len(source),), delay, dtype=torch.int64)
        for what, values, low, high in (
            ("source", source, 0, self.source_size - 1),
            ("target", target, 0, self.target_size - 1),
            ("delay", delay, 1, _MOST_DELAY),
        ):
            if values.dtype is not torch.int64 or values.shape != weight.shape[:1] or not len(values):
                raise self._refusal(
                    what, f"int64 {[*weight.shape[:1]]}, of 1 or more", f"{values.dtype} {[*values.shape]}"
                )
            least, most = map(int, torch.aminmax(values))
            if least < low or most > high:
                raise self._refusal(what, f"in {low} … {high}", least if least < low else most)
        if weight.dtype is not torch.float32 or weight.dim() != 1 or not bool(weight.isfinite().all()):
            raise self._refusal("weight", "a float32 vector of finite numbers", f"{weight.dtype} {[*weight.shape]}")
        if weight.requires_grad:
            rule = "without gradients, as these synapses don't train; give weight.detach()"
            raise self._refusal("weight", rule, type(weight).__name__)
        order = (source * self.target_size + target).argsort(stable=True)
        starts = torch.zeros(self.source_size + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(source, minlength=self.source_size), 0, out=starts[1:])
        sorted_ = weight[order]
        padded = torch.cat([sorted_, sorted_[-1:].expand(-len(order) % _BLOCK)])
        packed = q4.quantize(padded[None], "q4_1")
        codes = q4.unpack_codes(packed.qdata, packed.packing).view(-1, 2)
        if packed.offset is None:
            raise TypeError("a weight of Q4_1 has offsets")
        self.register_buffer("starts", starts)
        at = target[order]
        self.register_buffer("index", at.to(torch.int16) if self.target_size <= _SHORT else at.to(torch.int32))
        self.register_buffer("codes", codes[:, 0] | codes[:, 1] << 4)
        self.register_buffer("scale", packed.scale.view(-1).clone())
        self.register_buffer("offset", packed.offset.view(-1).clone())
        self.register_buffer("steps", delay[order].to(torch.uint8))
        self.register_buffer("ring", torch.zeros(int(delay.max()) + 1, self.target_size), persistent=False)
        self.now = 0
        self.events = 0
        """Synapses that delivered since ``reset``."""

    def _refusal(self, name: str, rule: str, value: object) -> q4.InputError:
        return q4.InputError(f"projection {self.name!r}", name=name, rule=rule, value=value)

    @property
    def synapses(self) -> int:
        """The number of synapses."""
        return len(self.index)

    @property
    def bytes_per_synapse(self) -> float:
        """Bytes of all that is stored of the synapses, the ring of coming input apart, for each of them."""
        stored = (self.starts, self.index, self.codes, self.scale, self.offset, self.steps)
        return sum(item.nbytes for item in stored) / self.synapses

    def synapses_of(self, spiking: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return target (int64), weight (float32) and delay (int64) of all synapses of some sources, in their order."""
        first = self.starts[spiking]
        counts = self.starts[spiking + 1] - first
        ends = counts.cumsum(0)
        index = torch.arange(int(ends[-1]) if len(ends) else 0, device=ends.device)
        index += torch.repeat_interleave(first - ends + counts, counts)
        code = self.codes[index >> 1] >> ((index & 1) * 4).to(torch.uint8) & 15
        block = index // _BLOCK
        weight = self.offset[block].float().addcmul_(self.scale[block].float(), code.float())
        target = self.index[index].to(torch.int64)
        return target & (_SHORT - 1) if self.index.dtype is torch.int16 else target, weight, self.steps[index].long()

    def deliver(self, spiking: torch.Tensor) -> None:
        """Add the weights of the sources that spike now to the input of the steps at which they arrive.

        Args:
            spiking: int64 [n], indices of sources, each at most once.

        Raises:
            InputError: It is no int64 vector, or an index is out of range; nothing is delivered.
        """
        if spiking.dtype is not torch.int64 or spiking.dim() != 1:
            raise self._refusal("spiking", "an int64 vector", f"{spiking.dtype} {[*spiking.shape]}")
        if not len(spiking):
            return
        least, most = map(int, torch.aminmax(spiking))
        if least < 0 or most >= self.source_size:
            raise self._refusal("spiking", f"in 0 … {self.source_size - 1}", least if least < 0 else most)
        self._send(self.ring, self.now, spiking)

    def _send(self, ring: torch.Tensor, now: int, spiking: torch.Tensor, sample: torch.Tensor | None = None) -> None:
        """Add what spikes [S], of samples [S], give to a ring [steps, B · targets]; ``now`` is the step that is."""
        target, weight, delay = self.synapses_of(spiking)
        place = (delay + now) % len(ring) * ring.shape[1] + target
        if sample is not None:
            place += (sample * self.target_size).repeat_interleave(self.starts[spiking + 1] - self.starts[spiking])
        ring.view(-1).index_add_(0, place, weight)
        self.events += len(target)

    def advance(self) -> torch.Tensor:
        """Move on by one step, and return the input that arrives at it, float32 [targets]: delay 1 is the next step."""
        self.now = (self.now + 1) % len(self.ring)
        return _take(self.ring, self.now)

    def coming(self, batch: int) -> torch.Tensor:
        """Return a ring of no input [steps, batch, targets], for ``forward``."""
        return self.ring.new_zeros(len(self.ring), batch, self.target_size)

    def forward(self, spikes: torch.Tensor, coming: torch.Tensor, step: int) -> torch.Tensor:
        """Return what arrives in a step [B, targets], and write the rest to a ring, in place.

        Args:
            spikes: [B, sources], what the sources gave a step ago.
            coming: [steps, B, targets], as ``coming`` returned it and steps before this one left it.
            step: The number of this step.

        Raises:
            InputError: Spikes of another size, or gradients are to reach them.
        """
        if spikes.shape != (coming.shape[1], self.source_size) or (spikes.requires_grad and torch.is_grad_enabled()):
            rule = (
                f"of shape {[coming.shape[1], self.source_size]} and without gradients, as these synapses don't train"
            )
            value = f"{[*spikes.shape]}{', with gradients' * spikes.requires_grad}"
            raise self._refusal("spikes", f"{rule}; torch.no_grad() runs them", value)
        sample, spiking = spikes.nonzero(as_tuple=True)
        self._send(coming.view(len(coming), -1), step - 1, spiking, sample)
        return _take(coming, step % len(coming))

    def reset(self) -> None:
        """Clear what is on its way, and the counts."""
        self.ring.zero_()
        self.now = self.events = 0

    def extra_repr(self) -> str:
        """Return the facts that ``print(model)`` shows."""
        return (
            f"{self.source_size} → {self.target_size}, {self.synapses} synapses of {self.bytes_per_synapse:.2f} bytes"
        )

    @classmethod
    def fixed_total_number(  # noqa: PLR0913  # one argument per fact of a distribution
        cls,
        sizes: Sequence[int],
        counts: torch.Tensor,
        weight: torch.Tensor,
        delay: torch.Tensor,
        *,
        weight_spread: float,
        delay_spread: float,
        generator: torch.Generator,
    ) -> SparseProjection:
        """Return populations joined by given numbers of random synapses, among all their neurons.

        Weights and delays are normal. A weight has the sign of its mean, and a delay is at least one step: what falls
        outside is drawn again.

        Args:
            sizes: Neurons of each of P populations; indices run through one after the other.
            counts: int64 [P, P], synapses from population j to i at [i, j].
            weight: [P, P], their mean.
            delay: [P, P], their mean in steps.
            weight_spread: Standard deviation of weights, of their mean.
            delay_spread: Of delays, of theirs.
            generator: Source of the random numbers.

        Raises:
            InputError: There is no synapse, a count is negative, or a mean delay is below one step.
        """
        what = "synapses of fixed total number"
        if not int(counts.sum()) or int(counts.min()) < 0:
            raise q4.InputError(what, name="counts", rule="0 or more, some above", value=counts.tolist())
        if not bool((delay[counts > 0] >= 1).all()):
            raise q4.InputError(what, name="delay", rule="1 step or more", value=delay.tolist())
        first = torch.tensor([0, *sizes]).cumsum(0).tolist()
        parts: list[tuple[torch.Tensor, ...]] = []
        for i, j in counts.nonzero().tolist():
            count = int(counts[i, j])
            source, target = fixed_total_number(sizes[j], sizes[i], count, generator=generator)
            strength = _normal(count, weight_spread, 0.0, generator) * weight[i, j]
            steps = _normal(count, delay_spread, 0.5 / float(delay[i, j]), generator) * delay[i, j]
            parts.append((source + first[j], target + first[i], strength, steps.round().clamp(1, _MOST_DELAY).long()))
        source, target, strength, steps = (torch.cat(items) for items in zip(*parts, strict=True))
        return cls(source, target, strength, steps, sources=first[-1], targets=first[-1])


def _end(population: int | Population, role: str) -> tuple[str, int]:
    """Return the name and size of one end of the synapses."""
    if isinstance(population, Population):
        return population.name, population.size
    if not isinstance(population, int) or isinstance(population, bool) or population < 1:
        rule = "a population, or a positive whole number"
        raise q4.ConfigError("sparse projection", name=f"{role}s", rule=rule, value=population)
    return role, population


def _take(ring: torch.Tensor, row: int) -> torch.Tensor:
    """Return a row of a ring, and leave zeros there."""
    arrived = ring[row].clone()
    ring[row] = 0
    return arrived


def _normal(count: int, spread: float, least: float, generator: torch.Generator) -> torch.Tensor:
    """Return normal numbers about 1, none below ``least``."""
    values = 1 + spread * torch.randn(count, generator=generator)
    while bool((wrong := values < least).any()):
        values[wrong] = 1 + spread * torch.randn(int(wrong.sum()), generator=generator)
    return values
