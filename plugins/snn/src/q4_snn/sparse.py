"""``SparseProjection``: the synapses that exist, each with a weight of four bits and a delay of its own.

A spike reads the synapses of its source alone, ``q4_programs.SparseWeight``: 2.63 bytes each.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

import q4core as q4
from q4_programs import SparseBuilder, SparseWeight, add_in_order
from q4_snn.population import Population, check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SparseProjection", "SparseSynapses", "refuse_export"]

_MOST_DELAY = 255
_PIECE = 1 << 18
"""Synapses that are drawn together."""
_FIELDS = "starts", "first", "gaps", "steps", "codes", "levels"


class SparseSynapses(nn.Module):
    """A sparse weight as a module: moved, saved and loaded with it, and shared between actors without a copy.

    Args:
        weight: What it holds; its tensors are the module's buffers.
    """

    def __init__(self, weight: SparseWeight) -> None:
        super().__init__()
        for name, tensor in zip(_FIELDS, weight.tensors(), strict=True):
            self.register_buffer(name, tensor)
        self._sizes = weight.sources, weight.targets
        self._weight: SparseWeight | None = weight
        self._seen = self._marks()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the buffers alone."""
        return {**self.__dict__, "_weight": None}

    def _marks(self) -> list[tuple[int, int]]:
        """Return what changes with the buffers, and with what is in them."""
        held = [self._buffers[name] for name in _FIELDS]
        return [(id(item), 0 if item.is_inference() else item._version) for item in held if item is not None]  # noqa: SLF001  # torch documents it under this name

    def shared_form(self) -> tuple[Callable[..., SparseSynapses], tuple[torch.Tensor, ...]]:
        """Return what makes it over other memory with the same numbers, and its tensors, for ``ActorSystem.share``."""
        return functools.partial(_over, *self._sizes), self.weight.tensors()

    @property
    def weight(self) -> SparseWeight:
        """The weight, over the buffers as they are now.

        Raises:
            InputError: They were loaded or written, and are no synapses any more.
        """
        known = self._weight
        if (marks := self._marks()) != self._seen or known is None:
            known = SparseWeight(*self._sizes, *(self.get_buffer(name) for name in _FIELDS))
            known.check()
            self._weight, self._seen = known, marks
        return known

    def extra_repr(self) -> str:
        """Return the facts that ``print(model)`` shows."""
        weight = self.weight
        return (
            f"{weight.sources} → {weight.targets}, {weight.synapses} synapses of "
            f"{weight.nbytes / weight.synapses:.2f} bytes"
        )


def _over(sources: int, targets: int, *tensors: torch.Tensor) -> SparseSynapses:
    """Return synapses over tensors that were checked."""
    return SparseSynapses(SparseWeight(sources, targets, *tensors))


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
        self._place(sources, targets, name)
        if not isinstance(weight, torch.Tensor):
            weight = torch.full((len(source),), float(weight), dtype=torch.float32)
        if isinstance(delay, int):
            delay = torch.full((len(source),), delay, dtype=torch.int64)
        weights = SparseWeight.of(
            source, target, weight, delay, sources=self.source_size, targets=self.target_size, label=self._label
        )
        self._take(weights)

    @classmethod
    def of(
        cls, weight: SparseWeight, *, sources: int | Population, targets: int | Population, name: str | None = None
    ) -> SparseProjection:
        """Return a projection of synapses that are there: read from a file, or made in pieces by a ``SparseBuilder``.

        Args:
            weight: The synapses; used as they are, without a copy.
            sources: The source population, or how many sources there are.
            targets: The target population, or how many targets there are.
            name: Defaults to ``source->target``.

        Raises:
            ConfigError: As of the class.
            InputError: The weight is of other sizes.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        cls._place(made, sources, targets, name)
        if (sizes := (made.source_size, made.target_size)) != (found := (weight.sources, weight.targets)):
            raise cls._refusal(made, "weight", f"of {sizes[0]} sources and {sizes[1]} targets", found)
        cls._take(made, weight)
        return made

    def _place(self, sources: int | Population, targets: int | Population, name: str | None) -> None:
        """Take the two ends and the name."""
        self.source, self.source_size = _end(sources, "source")
        self.target, self.target_size = _end(targets, "target")
        self.name = f"{self.source}->{self.target}" if name is None else name
        check_name("projection", self.name, ".")
        if isinstance(sources, Population) and not sources.is_binary:
            rule = "a population of spikes: of neurons that fire, or an input with spikes=True"
            raise q4.ConfigError(f"projection {self.name!r}", name="sources", rule=rule, value=sources.name)
        self._label = f"projection {self.name!r}"

    def _take(self, weight: SparseWeight) -> None:
        self.packed = SparseSynapses(weight)
        self._ring: torch.Tensor | None = None
        self.now = 0
        self.events = 0
        """Synapses that delivered since ``reset``."""

    @property
    def weight(self) -> SparseWeight:
        """The synapses."""
        return self.packed.weight

    @property
    def ring(self) -> torch.Tensor:
        """float32 [longest delay + 1, targets], the input of coming steps of ``deliver`` and ``advance``."""
        if self._ring is None:
            self._ring = self.coming(1)[:, 0]
        return self._ring

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> SparseProjection:  # noqa: FBT001, FBT002  # torch's
        """Forget what is on its way where the synapses move."""
        self._ring = None
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]  # torch has no types for it

    def _refusal(self, name: str, rule: str, value: object) -> q4.InputError:
        return q4.InputError(self._label, name=name, rule=rule, value=value)

    @property
    def synapses(self) -> int:
        """The number of synapses."""
        return self.weight.synapses

    @property
    def bytes_per_synapse(self) -> float:
        """Bytes of all that is stored of the synapses, the ring of coming input apart, for each of them."""
        return self.weight.nbytes / self.synapses

    def synapses_of(self, spiking: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return target (int64), weight (float32) and delay (int64) of all synapses of some sources, in their order."""
        return self.weight.synapses_of(spiking)

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
        source, target, weight, delay = self.weight.with_places(spiking)
        place = (delay + now) % len(ring) * ring.shape[1] + target
        if sample is not None:
            place += sample[source] * self.target_size
        add_in_order(ring.view(-1), place, weight)
        self.events += len(target)

    def advance(self) -> torch.Tensor:
        """Move on by one step, and return the input that arrives at it, float32 [targets]: delay 1 is the next step."""
        self.now = (self.now + 1) % len(self.ring)
        return _take(self.ring, self.now)

    @property
    def memory_steps(self) -> int:
        """How many of the last calls of ``forward`` decide what is on its way."""
        return self.weight.longest - 1

    def coming(self, batch: int) -> torch.Tensor:
        """Return a ring of no input [steps, batch, targets], for ``forward``."""
        weight = self.weight
        return torch.zeros(weight.longest + 1, batch, self.target_size, device=weight.device)

    def forward(self, spikes: torch.Tensor, coming: torch.Tensor, step: int) -> torch.Tensor:
        """Return what arrives in a step [B, targets], and write the rest to a ring, in place.

        Currents are summed in float32, and returned in the dtype of the spikes.

        Args:
            spikes: [B, sources], what the sources gave a step ago.
            coming: [steps, B, targets], as ``coming`` returned it and steps before this one left it.
            step: The number of this step.

        Raises:
            InputError: Spikes of another size, or gradients are to reach them.
            LifecycleError: Inside ``torch.export``.
        """
        if torch.compiler.is_exporting():
            refuse_export(self._label)
        if spikes.shape != (coming.shape[1], self.source_size) or (spikes.requires_grad and torch.is_grad_enabled()):
            rule = (
                f"of shape {[coming.shape[1], self.source_size]} and without gradients, as these synapses don't train"
            )
            value = f"{[*spikes.shape]}{', with gradients' * spikes.requires_grad}"
            raise self._refusal("spikes", f"{rule}; torch.no_grad() runs them", value)
        sample, spiking = spikes.nonzero(as_tuple=True)
        self._send(coming.view(len(coming), -1), step - 1, spiking, sample)
        arrived = _take(coming, step % len(coming))
        return arrived.to(spikes.dtype) if spikes.is_floating_point() else arrived

    def reset(self) -> None:
        """Clear what is on its way, and the counts."""
        self._ring = None
        self.now = self.events = 0

    def extra_repr(self) -> str:
        """Return the facts that ``print(model)`` shows."""
        return f"{self.source} → {self.target}"

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
        later: int = 0,
        population: Population | None = None,
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
            later: Steps that each delay gets on top: 1 for the delays of NEST's neurons with synaptic currents, where a
                spike acts in the step after the one in which it arrives.
            population: All the neurons as one population of a network; None for synapses with a clock of their own.

        Raises:
            ConfigError: The population has another size.
            InputError: There is no synapse, a count is negative, or a mean delay is below one step.
        """
        what = "synapses of fixed total number"
        if not int(counts.sum()) or int(counts.min()) < 0:
            raise q4.InputError(what, name="counts", rule="0 or more, some above", value=counts.tolist())
        if not isinstance(later, int) or isinstance(later, bool) or not 0 <= later < _MOST_DELAY:
            raise q4.InputError(what, name="later", rule=f"0 … {_MOST_DELAY - 1} steps", value=later)
        if not bool((delay[counts > 0] >= 1).all()):
            raise q4.InputError(what, name="delay", rule="1 step or more", value=delay.tolist())
        first = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        if population is not None and population.size != first[-1]:
            rule = f"of {first[-1]} neurons, as sizes are"
            raise q4.ConfigError(what, name="population", rule=rule, value=population.size)
        builder = SparseBuilder(first[-1], first[-1], int(counts.sum()), label=what)
        for j, size in enumerate(sizes):
            into = [i for i in range(len(sizes)) if counts[i, j]]
            numbers = [_shared_out(int(counts[i, j]), size, generator) for i in into]
            ends = torch.stack([*numbers, torch.zeros(size, dtype=torch.int64)]).sum(0).cumsum(0)
            low = 0
            while low < size and into:
                reached = int(ends[low - 1]) if low else 0
                high = max(low + 1, int(torch.searchsorted(ends, reached + _PIECE, right=True)))
                parts: list[tuple[torch.Tensor, ...]] = []
                for i, number in zip(into, numbers, strict=True):
                    source = torch.repeat_interleave(torch.arange(low, high), number[low:high])
                    target = torch.randint(first[i], first[i + 1], (len(source),), generator=generator)
                    strength = _normal(len(source), weight_spread, 0.0, generator) * weight[i, j]
                    steps = _normal(len(source), delay_spread, 0.5 / float(delay[i, j]), generator) * delay[i, j]
                    steps = steps.round().clamp(1, _MOST_DELAY - later).long() + later
                    parts.append((source + first[j], target, strength.float(), steps))
                if any(len(part[0]) for part in parts):
                    builder.add(*(torch.cat(items) for items in zip(*parts, strict=True)))
                low = high
        neurons = first[-1] if population is None else population
        return cls.of(builder.finish(), sources=neurons, targets=neurons)


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001  # the public one imports its compiler
def refuse_export(what: str) -> NoReturn:
    """Refuse to become a graph.

    Raises:
        LifecycleError: Always.
    """
    hint = "Write it with q4_snn.write_nir. Within torch.compile it runs as it is."
    raise q4.LifecycleError(f"{what} can't be exported: its steps depend on its inputs' numbers", hint=hint)


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


def _shared_out(count: int, among: int, generator: torch.Generator) -> torch.Tensor:
    """Return how many of a number of synapses each source has, [among], where each has a random source."""
    found = torch.zeros(among, dtype=torch.int64)
    for start in range(0, count, _PIECE):
        drawn = torch.randint(among, (min(_PIECE, count - start),), generator=generator)
        found += drawn.bincount(minlength=among)
    return found
